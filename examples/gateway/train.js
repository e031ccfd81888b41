// A rank in JavaScript, made from gateway.proto alone: npm install @grpc/grpc-js @grpc/proto-loader
//
// GATEWAY_PROTO names the .proto file.
"use strict";
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const STEPS = 20, SAMPLES = 64, CHUNK = 1 << 20;
const truth = [1.0, -2.0, 3.0, 0.5];
const { Gateway } = grpc.loadPackageDefinition(loader.loadSync(process.env.GATEWAY_PROTO)).covey.gateway;
const gateway = new Gateway(process.env.COVEY_GATEWAY, grpc.credentials.createInsecure());

// This rank lives as long as the stream of Register.
function register() {
  const registration = gateway.Register({ program: "node" });
  const ended = new Promise((resolve, reject) => registration.on("end", resolve).on("error", reject));
  ended.catch(() => {}); // the operation that fails says the same
  return new Promise((resolve, reject) => {
    registration.on("data", (event) => event.joined && resolve({ ...event.joined, ended })).on("error", reject);
  });
}

// Return the mean of the arrays of all ranks.
function allReduce(session, values) {
  return new Promise((resolve, reject) => {
    const chunks = [];
    const call = gateway.AllReduce({ deadline: Date.now() + 60_000 });
    call.on("data", (piece) => piece.chunk && chunks.push(piece.chunk)).on("error", reject);
    call.on("end", () => resolve(new Float64Array(Uint8Array.from(Buffer.concat(chunks)).buffer)));
    call.write({ start: { session, dtype: "float64", shape: [values.length], op: "mean" } });
    const data = Buffer.from(values.buffer);
    for (let at = 0; at < data.length; at += CHUNK) call.write({ chunk: data.subarray(at, at + CHUNK) });
    call.end();
  });
}

function ask(method, request) {
  return new Promise((resolve, reject) => {
    gateway[method](request, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

async function main() {
  const { session, rank, size, ended } = await register();
  const inputs = Array.from({ length: SAMPLES }, (_, each) =>
    truth.map((_, k) => Math.sin((each + SAMPLES * rank) * (k + 1))));
  const weights = new Float64Array(4);
  for (let step = 0; step < STEPS; step++) {
    const errors = inputs.map((row) => row.reduce((sum, x, k) => sum + x * (weights[k] - truth[k]), 0));
    const gradient = Float64Array.from(truth, (_, k) =>
      (2 * inputs.reduce((sum, row, each) => sum + row[k] * errors[each], 0)) / SAMPLES);
    const mean = await allReduce(session, gradient);
    for (let k = 0; k < 4; k++) weights[k] -= 0.5 * mean[k];
    if (process.env.END_AT === String(step)) process.exit(3); // for the test of a loss
  }
  await ask("Barrier", { session });
  console.log(`rank ${rank} of ${size}: ${Buffer.from(weights.buffer).toString("hex")}`);
  await ask("Leave", { session });
  await ended;
}

main().then(() => process.exit(0), (error) => {
  const details = error.metadata ? JSON.stringify(error.metadata.getMap()) : "";
  console.error(`${error.message} ${details}`);
  process.exit(1);
});
