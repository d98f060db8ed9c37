// BullMQ: one process that works on 100 jobs at once. The protocol is that of driver.py.
import { appendFileSync, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { Queue, Worker } from "bullmq";

const url = new URL(process.env.BENCH_STORE);
const connection = { host: url.hostname, port: Number(url.port), maxRetriesPerRequest: null };
const PAYLOAD = { to: "someone@example.com", subject: "x".repeat(100), n: 12345 };
const BATCH = 100;

const now = () => (performance.timeOrigin + performance.now()) / 1000;

async function handle(job) {
  if (job.data.sent !== undefined) {
    appendFileSync(process.env.BENCH_DELAYS, `${now() - job.data.sent}\n`);
  }
  return { ok: true };
}

async function answer(queue, request) {
  if (request.operation === "spaced") {
    for (let number = 0; number < request.count; number++) {
      if (number) await sleep(request.interval * 1000);
      await queue.add("handle", { ...PAYLOAD, sent: now() });
    }
    return {};
  }
  const started = performance.now();
  let count = 0;
  while (performance.now() - started < request.seconds * 1000) {
    if (request.operation === "enqueue") {
      await queue.add("handle", PAYLOAD);
      count += 1;
    } else {
      await queue.addBulk(Array.from({ length: BATCH }, () => ({ name: "handle", data: PAYLOAD })));
      count += BATCH;
    }
  }
  return { count, seconds: (performance.now() - started) / 1000 };
}

function version(name) {
  return JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
}

if (process.argv[2] === "work") {
  const worker = new Worker("bench", handle, { connection, concurrency: 100 });
  process.on("SIGTERM", async () => {
    await worker.close();
    process.exit(0);
  });
} else {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  const versions = { bullmq: version("bullmq"), ioredis: version("ioredis"), node: process.versions.node };
  console.log(JSON.stringify({ versions }));
  for await (const line of createInterface({ input: process.stdin })) {
    console.log(JSON.stringify(await answer(queue, JSON.parse(line))));
  }
  process.exit(0);
}
