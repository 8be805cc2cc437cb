// Unit tests of the pure functions of the page: node --test tests/page
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

const at = (name) => new URL(`../../services/rollmesh/services/gateway/page/static/${name}`, import.meta.url);
// As data, because node takes a file .js without package.json as CommonJS. These modules import nothing.
const load = async (name) => import(`data:text/javascript,${encodeURIComponent(await readFile(at(name), "utf8"))}`);
const scales = await load("scales.js");
const format = await load("format.js");
const route = await load("route.js");

test("ticks are round and within the range", () => {
  assert.deepEqual(scales.ticks(0, 1, 4), [0, 0.5, 1]);
  assert.deepEqual(scales.ticks(0, 3, 6, true), [0, 1, 2, 3]);
  assert.deepEqual(scales.ticks(-0.3, 0.3, 3), [-0.2, 0, 0.2]);
  assert.deepEqual(scales.ticks(5, 5), [5]);
  assert.ok(scales.ticks(0.1, 0.10000000000000002, 4).length <= 10, "a range below the precision of numbers ends");
});

test("an extent ignores missing values and is never empty", () => {
  assert.deepEqual(scales.extent([null, 2, Number.NaN, 5]), [2, 5]);
  assert.deepEqual(scales.extent([]), [0, 1]);
  const [low, high] = scales.extent([3]);
  assert.ok(low < 3 && high > 3);
  const rounded = scales.extent([0.1, 0.10000000000000002]);
  assert.ok(rounded[1] - rounded[0] > 0.01);
});

test("a moving average keeps gaps and the ends", () => {
  assert.deepEqual(scales.smoothed([0, 3, 6, null, 6], 3), [1.5, 3, 4.5, null, 6]);
  assert.deepEqual(scales.smoothed([1, 2], 1), [1, 2]);
});

test("an evaluation that goes on is not shown", () => {
  const [first, second, third] = [{ step: 0, num_samples: 4, complete: false }, { step: 5, num_samples: 8, complete: true }, { step: 10, num_samples: 3 }];
  assert.deepEqual(scales.shownEvaluations([first, second, third]), [first, second]);
  assert.deepEqual(scales.shownEvaluations([{ step: 0, num_samples: 0, complete: true }]), []);
});

test("a missing value interrupts a line", () => {
  assert.equal(scales.linePath([[0, 1], [1, null], [2, 3], [3, 4]]), "M0.0 1.0M2.0 3.0L3.0 4.0");
});

test("stacked shares sum to one", () => {
  assert.deepEqual(scales.stack({ a: 1, b: 3 }, ["a", "b"]), [{ key: "a", from: 0, to: 0.25 }, { key: "b", from: 0.25, to: 1 }]);
  assert.equal(scales.stack({}, ["a"])[0].to, 0);
});

test("a histogram of staleness has few rows, whatever the bound is", () => {
  assert.deepEqual(scales.lagRows(2, [0, 1]).labels, ["0", "1", "2"]);
  assert.deepEqual(scales.lagRows(131071, [0, 3]).labels, ["0", "1", "2", "3"]);
  const { labels, rowOf } = scales.lagRows(131071, [0, 100000], 32);
  assert.equal(labels.length, 32);
  assert.equal(rowOf(0), "0-3125");
  assert.equal(rowOf(100000), labels[31]);
  assert.equal(scales.lagRows(0, []).labels.length, 1);
});

test("samples without tokens of the policy do not change the mean staleness", () => {
  assert.equal(scales.meanLag({ "-1": 4, 0: 1, 2: 3 }), 1.5);
  assert.equal(scales.meanLag({ "-1": 4 }), undefined);
});

test("levels of advantages keep their sign", () => {
  assert.equal(scales.signedLevel(0.001, 2), 1);
  assert.equal(scales.signedLevel(-9, 2), -4);
  assert.equal(scales.signedLevel(null, 2), 0);
});

test("durations have at most two units", () => {
  assert.equal(format.duration(3.14), "3.1 s");
  assert.equal(format.duration(3700), "1 h 1 min");
  assert.equal(format.duration(86400), "1 d");
  assert.equal(format.duration(undefined), "–");
});

test("versions show the incarnation only after a roll-back", () => {
  assert.equal(format.version({ policy: "main", step: 3, incarnation: 0 }), "main@3");
  assert.equal(format.version({ policy: "main", step: 3, incarnation: 2 }), "main@3.2");
});

test("addresses of views survive a round trip, also with special characters", () => {
  const hash = route.link("a b", "sample", "g1.0/x-0?", { color: "source" });
  assert.deepEqual(route.parse(hash), { view: "sample", run: "a b", id: "g1.0/x-0?", query: { color: "source" } });
  assert.equal(route.parse("#/run/r/unknown").view, "runs");
  assert.equal(route.parse("#/%E0%A4%A").view, "runs");
  assert.equal(route.parse("").view, "runs");
});

test("submitted tasks are shown with those that are not answered", () => {
  assert.deepEqual(format.submittedTasks({ open: 1200, drawn: 3, answered: 0, finished: false }), ["0", "1,200 open, 3 drawn, clients may submit more"]);
  assert.deepEqual(format.submittedTasks({ answered: 5, finished: true }), ["5", "0 open, 0 drawn, no further ones follow"]);
});
