// Submits finished samples of a peer to a run: node submit_samples.mjs 127.0.0.1:7000 TOKEN_FILE RUN FILE
// A line of the file is one group as JSON: {"key": "north/12", "task": {...}, "answer_key": {...}, "turns": ["...", "..."]}, with the text
// of one turn of each episode. README.md says how to start it.
import { readFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const SUBMIT_BYTES = 1 << 20; // of a call: at most 2 MiB and 1024 episodes (run.proto)
const SUBMIT_MAX = 256;
const TRIES_MAX = 60; // while the quota of waiting groups is full, or the gateway restarts
const [address, tokenFile, run, file] = process.argv.slice(2);

const definitions = protoLoader.loadSync('rollmesh/v1/run.proto', {
  includeDirs: [PROTOS], keepCase: true, longs: Number, enums: String, defaults: true,
});
const { RunService } = grpc.loadPackageDefinition(definitions).rollmesh.v1;
const stub = new RunService(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set('authorization', `Bearer ${(await readFile(tokenFile, 'utf8')).trim()}`);

/** Return whether an error can pass. A quota can if the details of the status have a RetryInfo. */
function passes(err) {
  if (err.code !== grpc.status.RESOURCE_EXHAUSTED) {
    return [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED].includes(err.code);
  }
  return err.metadata.get('grpc-status-details-bin').some((details) => details.includes('google.rpc.RetryInfo'));
}

/** A call is idempotent by the keys of its groups, so it is repeated after every error that can pass. */
async function submit(request) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await new Promise((resolve, reject) => {
        const limit = { deadline: Date.now() + 60_000 };
        stub.SubmitSamples(request, metadata, limit, (err, reply) => (err ? reject(err) : resolve(reply)));
      });
    } catch (err) {
      if (!passes(err) || tries === TRIES_MAX) throw err;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

const source = 'SEGMENT_SOURCE_PEER';
const groups = (await readFile(file, 'utf8')).split('\n').filter(Boolean).map((line) => JSON.parse(line));
const calls = [];
for (const group of groups) {
  const episodes = group.turns.map((content, number) => ({
    key: { task: group.task.task_id, group: group.key, episode: String(number) },
    segments: [{ parent: -1, role: 'SEGMENT_ROLE_ACTION', source, messages: [{ role: 'assistant', content }] }],
  }));
  const size = JSON.stringify(group).length;
  const last = calls.at(-1);
  const isKnown = last?.tasks.some(({ task_id }) => task_id === group.task.task_id);
  if (!last || isKnown || last.size + size > SUBMIT_BYTES || last.episodes.length + episodes.length > SUBMIT_MAX) {
    calls.push({ size: 0, episodes: [], tasks: [], answer_keys: [] });
  }
  const call = calls.at(-1);
  call.size += size;
  call.episodes.push(...episodes);
  call.tasks.push(group.task);
  if (group.answer_key) call.answer_keys.push(group.answer_key);
}
for (const { episodes, tasks, answer_keys } of calls) {
  const reply = await submit({ run, source, episodes, tasks, answer_keys, provenance: { mesh: 'node' } });
  console.log(`${tasks.length} groups, ${reply.num_added} of them new; ${reply.submitted.groups} of ${reply.submitted.source}`);
}
stub.close();
