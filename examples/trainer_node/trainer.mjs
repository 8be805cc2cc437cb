// A trainer of a rollmesh run in Node.js, complete but for the training: it attaches, leases, fetches, commits, checkpoints and
// publishes weights that never change. Add an optimizer in `train`. README.md says how to start it.
import { createHash } from 'node:crypto';
import { mkdir, open, readFile, rename } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const CHUNK_BYTES = 16 << 20; // at most 64 MiB (weights.proto)
const PIECE_BYTES = 1 << 20; // at most 2 MiB
const RETURNS_MAX = 8; // returns to the checkpoint before the trouble is final
const CALL_S = 60;
const SUBMIT_MAX = 256; // tasks in a call: at most 1024 and 2 MiB (run.proto)

const definitions = protoLoader.loadSync(
  ['run.proto', 'weights.proto'].map((name) => `rollmesh/v1/${name}`),
  // Numbers are exact up to 2^53: steps, updates and sizes stay far below. Absent fields read as their defaults.
  { includeDirs: [PROTOS], keepCase: true, longs: Number, enums: String, defaults: true },
);
const { RunService, BlobService } = grpc.loadPackageDefinition(definitions).rollmesh.v1;
const encodeManifest = definitions['rollmesh.v1.WeightManifest'].serialize;

const OPTIONS = {
  'grpc.max_receive_message_length': 8 << 20,
  // Every verb may be sent again (run.proto), and waits for a server that is being restarted.
  'grpc.service_config': JSON.stringify({
    methodConfig: [{
      name: [{}],
      waitForReady: true,
      retryPolicy: {
        maxAttempts: 5, initialBackoff: '1s', maxBackoff: '8s', backoffMultiplier: 2, retryableStatusCodes: ['UNAVAILABLE'],
      },
    }],
  }),
};
const { status } = grpc;
const LOST = [status.ABORTED, status.FAILED_PRECONDITION, status.NOT_FOUND, status.UNAVAILABLE, status.DEADLINE_EXCEEDED];

const sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');
const limit = (seconds = CALL_S) => ({ deadline: Date.now() + 1000 * seconds });
const pieces = (bytes, size) =>
  Array.from({ length: Math.ceil(bytes.length / size) }, (_, n) => bytes.subarray(n * size, (n + 1) * size));

/** Int32 or float32 arrays travel as little-endian bytes of any alignment. */
const numbers = (bytes, read) => Array.from({ length: bytes.length / 4 }, (_, n) => bytes[read](4 * n));

class Trainer {
  constructor({ address, token, spec, weights, out, tasks }) {
    Object.assign(this, { spec, weights, out, tasks });
    this.metadata = new grpc.Metadata();
    this.metadata.set('authorization', `Bearer ${token}`);
    this.credentials = grpc.credentials.createInsecure(); // beyond loopback: createSsl(ca, key, certificate)
    this.run = new RunService(address, this.credentials, OPTIONS);
  }

  /** One verb with one answer. */
  ask(verb, fields, stub = this.run) {
    return new Promise((resolve, reject) => {
      stub[verb](fields, this.metadata, limit(), (err, reply) => (err ? reject(err) : resolve(reply)));
    });
  }

  /** From the checkpoint to the end of the run. An error with a code of LOST means: begin again. */
  async live() {
    const { update, digest } = await this.restore();
    Object.assign(this, { update, digest });
    await this.ask('CreateRun', { spec: this.spec }); // changes nothing if the run is there
    this.attached = await this.ask('AttachTrainer', { run: this.spec.run, last_update: update, digest, holder: 'node' });
    this.mine = { run: this.spec.run, trainer_epoch: this.attached.trainer_epoch };
    await this.publish(); // always after attaching: nothing is leased before there are weights to sample with
    if (this.tasks) await this.submit();
    for (let lease; (lease = await this.lease()) !== null; ) {
      await this.update_with(lease);
    }
  }

  /** Adds the tasks of a run with `submitted_tasks`. Those that are there already are not added again, so it is repeated at every start. */
  async submit() {
    for (let at = 0; at < this.tasks.length; at += SUBMIT_MAX) {
      const part = this.tasks.slice(at, at + SUBMIT_MAX);
      const reply = await this.ask('SubmitTasks', {
        run: this.spec.run,
        tasks: part.map(({ task }) => task),
        answer_keys: part.map(({ answer_key }) => answer_key).filter(Boolean),
        finish: at + SUBMIT_MAX >= this.tasks.length, // no further tasks follow: the run ends with these
      });
      console.log(`submitted ${part.length} tasks, ${reply.num_added} of them new`);
    }
  }

  /** The next update's batch; null once the run has ended. */
  async lease() {
    for (;;) {
      try {
        const reply = await this.ask('LeaseBatch', { ...this.mine, update: this.update + 1, wait_s: 20 });
        if (reply.lease_id) return reply;
        console.log(`waiting for ${reply.waiting_for}`);
      } catch (err) {
        if (err.code !== status.OUT_OF_RANGE) throw err;
        return null;
      }
    }
  }

  async update_with(lease) {
    const renewing = this.renew(lease);
    try {
      const samples = await this.fetch(lease);
      const { outcome, dropped, measured } = await train(samples, lease.groups);
      const commit = await this.ask('CommitUpdate', {
        ...this.mine,
        update: this.update + 1,
        lease_ids: [lease.lease_id],
        samples: dropped.map(([sample_id, reason]) => ({ sample_id, reason, disposition: 'SAMPLE_DISPOSITION_DROPPED' })),
        outcome,
        groups: measured,
      });
      this.update += 1;
      this.digest = commit.digest;
      console.log(seen(lease.groups));
      const lags = lease.samples.map((sample) => sample.staleness);
      console.log(`update ${this.update}: ${samples.length} samples, staleness up to ${Math.max(...lags)}`);
      if (this.tasks) console.log(`answered: ${[...new Set(samples.map(({ task }) => task))].join(' ')}`);
    } finally {
      clearInterval(renewing);
    }
    await this.save();
    await this.publish();
  }

  /** Keeps the batch while it is trained. If it is lost all the same, the commit says so. */
  renew(lease) {
    const again = () => this.ask('RenewBatch', { ...this.mine, lease_id: lease.lease_id }).catch(() => {});
    return setInterval(again, (1000 * lease.lease_s) / 3);
  }

  /** Every leased sample with its tokens, from the root of its episode's tree to its leaf; null if they cannot be read. */
  async fetch(lease) {
    const leased = new Map(lease.samples.map((sample) => [sample.meta.sample_id, sample]));
    const found = [];
    const messages = this.run.FetchSamples({ ...this.mine, lease_id: lease.lease_id }, this.metadata, limit(300));
    for await (const { episode, sample_ids } of messages) { // without an episode if its payload cannot be read
      for (const sample of sample_ids.map((id) => leased.get(id))) {
        found.push({ ...sample, tokens: episode && pathTokens(episode, sample.meta.leaf) });
      }
    }
    return found;
  }

  async publish() {
    const { update: step, attached: { incarnation, weights_address } } = this;
    const chunks = pieces(this.weights, CHUNK_BYTES);
    const file = {
      name: 'model.safetensors',
      size_bytes: this.weights.length,
      chunks: chunks.map((chunk) => ({ digest: sha256(chunk), size_bytes: chunk.length })),
    };
    const manifest = encodeManifest({ kind: 'KIND_FULL', files: [file], dtype: 'float32' });
    const depot = new BlobService(weights_address, this.credentials, OPTIONS);
    try {
      for (const blob of [...chunks, manifest]) { // the manifest last: it never names what is not there
        await this.put(depot, blob, `weights:${this.spec.run}/main@${step}.${incarnation}`);
      }
    } finally {
      depot.close();
    }
    const version = { policy: 'main', step, incarnation, weights_digest: sha256(manifest) };
    await this.ask('PublishVersion', { ...this.mine, version });
  }

  /** Stores a blob; one that is there already only gets one more owner. */
  async put(depot, blob, owner) {
    const digest = sha256(blob);
    const { missing } = await this.ask('Has', { digests: [digest] }, depot);
    await new Promise((resolve, reject) => {
      const call = depot.Put(this.metadata, limit(), (err, reply) => (err ? reject(err) : resolve(reply)));
      call.write({ digest, size_bytes: blob.length, owner });
      for (const data of missing.length ? pieces(blob, PIECE_BYTES) : []) call.write({ data });
      call.end();
    });
  }

  /** Durable before it is reported: what is in it is the truth about what the weights were trained on. */
  async save() {
    const { update, digest } = this;
    const file = await open(`${this.out}/checkpoint.partial`, 'w');
    await file.writeFile(JSON.stringify({ update, digest })); // and your weights and optimizer state
    await file.sync();
    await file.close();
    await rename(`${this.out}/checkpoint.partial`, `${this.out}/checkpoint.json`);
    await this.ask('ReportCheckpoint', { ...this.mine, update, digest });
  }

  async restore() {
    try {
      return JSON.parse(await readFile(`${this.out}/checkpoint.json`, 'utf8'));
    } catch (err) {
      if (err.code !== 'ENOENT') throw err;
      return { update: 0, digest: '' };
    }
  }
}

/** What a method may read of all members of the groups, also of those that were not leased. */
function seen(groups) {
  const members = groups.flatMap((group) => group.members);
  const turns = members.flatMap(({ summary }) => summary?.turns ?? []); // null from a worker of older protos
  const answers = new Set(members.flatMap(({ rewards }) => rewards.map(({ answer }) => answer)).filter(Boolean));
  const observations = new Set(turns.map(({ observation }) => observation));
  const count = (things) => `${things.length ?? things.size}`;
  return `groups: ${count(members)} members, ${count(turns)} turns, ${count(answers)} answers, ${count(observations)} observations`;
}

/** Token ids, log-probs under the distribution sampled from, and what may be trained on, along a path of segments. */
function pathTokens(episode, leaf) {
  const path = [];
  for (let at = leaf; at >= 0; at = episode.segments[at].parent) path.unshift(episode.segments[at]);
  return path.map((segment) => ({
    ids: numbers(segment.token_ids, 'readInt32LE'),
    logprobs: numbers(segment.logprobs, 'readFloatLE'), // empty: not sampled
    mask: [...segment.loss_mask], // empty: nowhere
    source: segment.source,
    step: segment.version?.step,
  }));
}

/** YOUR OPTIMISER. Says what became of the update, which samples were left out and why: [sample id, reason], and what selectors may read. */
async function train(samples, groups) {
  const dropped = samples
    .filter((sample) => !sample.tokens || !sample.meta.trainable)
    .map((sample) => [sample.meta.sample_id, sample.tokens ? 'NOT_TRAINABLE' : 'UNREADABLE']);
  const left = new Set(dropped.map(([sample_id]) => sample_id));
  const used = samples.filter((sample) => !left.has(sample.meta.sample_id));
  const measured = groups.map((group) => measure(group, used)).filter(({ num_tokens }) => num_tokens);
  return { outcome: used.length ? 'UPDATE_OUTCOME_APPLIED' : 'UPDATE_OUTCOME_SKIPPED', dropped, measured };
}

/** Means over the used tokens of a group. The advantage is the reward minus its mean; the ratio of the policies is 1 without training. */
function measure({ group, members }, used) {
  const rewards = new Map(members.map((m) => [m.sample_id, m.rewards.reduce((sum, reward) => sum + reward.value, 0)]));
  const mean = [...rewards.values()].reduce((a, b) => a + b, 0) / rewards.size;
  const rows = used.filter((sample) => sample.group === group).map((sample) => ({
    advantage: rewards.get(sample.meta.sample_id) - mean,
    num: sample.tokens.flatMap(({ mask }) => mask).filter(Boolean).length,
  }));
  const num_tokens = rows.reduce((sum, { num }) => sum + num, 0);
  const average = (value) => rows.reduce((sum, row) => sum + row.num * value(row), 0) / num_tokens;
  return { group, num_tokens, mean_abs_advantage: average((r) => Math.abs(r.advantage)), policy_loss: -average((r) => r.advantage) };
}

async function main() {
  const names = ['address', 'token-file', 'spec', 'weights', 'out'];
  const { values } = parseArgs({ options: Object.fromEntries([...names, 'tasks'].map((name) => [name, { type: 'string' }])) });
  const missing = names.filter((name) => !values[name]);
  if (missing.length) throw new Error(`missing ${missing.map((name) => `--${name}`).join(', ')}; see README.md`);
  await mkdir(values.out, { recursive: true });
  const trainer = new Trainer({
    address: values.address,
    token: (await readFile(values['token-file'], 'utf8')).trim(),
    spec: JSON.parse(await readFile(values.spec, 'utf8')),
    weights: await readFile(values.weights),
    out: values.out,
    tasks: values.tasks && (await readFile(values.tasks, 'utf8')).split('\n').filter(Boolean).map((line) => JSON.parse(line)),
  });
  for (let returns = 0; ; returns += 1) {
    try {
      return await trainer.live();
    } catch (err) {
      if (!LOST.includes(err.code) || returns >= RETURNS_MAX) throw err;
      console.log(`back to the checkpoint: ${status[err.code]}: ${err.details}`);
      await sleep(Math.min(8000, 500 * 2 ** returns));
    }
  }
}

await main();
process.exit(0); // channels would keep the process alive
