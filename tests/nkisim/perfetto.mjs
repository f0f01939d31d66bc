// Loads a trace into Perfetto's own trace processor and prints the rows of queries as JSON: node perfetto.mjs FOLDER TRACE SQL...
// FOLDER holds Perfetto's engine_bundle.js and trace_processor.wasm, as its web page is distributed; the bundle is a web
// worker, which sees here a worker's globals, requests that read the folder, and a port.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3;

// protobuf, as far as TraceProcessorRpc needs it
const varint = (n) => (n < 128 ? [n] : [(n % 128) + 128, ...varint(Math.floor(n / 128))]);
const number = (field, n) => Buffer.from([...varint(field * 8), ...varint(n)]);
const bytes = (field, data) => Buffer.concat([Buffer.from([...varint(field * 8 + 2), ...varint(data.length)]), data]);

function read(data, at) {
  let value = 0n, shift = 0n, byte;
  do {
    byte = data[at++];
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
  } while (byte & 128);
  return [BigInt.asIntN(64, value), at];
}

function fields(data) {
  const found = [];
  for (let at = 0; at < data.length; ) {
    let key, value;
    [key, at] = read(data, at);
    const kind = Number(key & 7n);
    if (kind === 0) [value, at] = read(data, at);
    else {
      let length = 8n;
      if (kind === 2) [length, at] = read(data, at);
      value = data.subarray(at, (at += Number(length)));
    }
    found.push([Number(key >> 3n), value]);
  }
  return found;
}

const packed = (data) => {
  const values = [];
  for (let at = 0; at < data.length; ) {
    let value;
    [value, at] = read(data, at);
    values.push(Number(value));
  }
  return values;
};
const of = (list, field) => list.filter(([f]) => f === field).map(([, v]) => v);

// QueryResult: names of columns, an error, and batches of cells by kind (1 null, 2 integer, 3 float, 4 string)
function rows(result) {
  const parts = fields(result), names = of(parts, 1).map(String), error = of(parts, 2).map(String)[0];
  if (error) throw new Error(error);
  const cells = of(parts, 3).flatMap((data) => {
    const batch = fields(data), integers = of(batch, 2).flatMap(packed);
    const floats = of(batch, 3).flatMap((b) => Array.from({ length: b.length / 8 }, (_, i) => b.readDoubleLE(8 * i)));
    const texts = of(batch, 5).map(String).join("").split("\0");
    return of(batch, 1).flatMap(packed).map((kind) => [null, null, integers, floats, texts][kind]?.shift() ?? null);
  });
  return Array.from({ length: cells.length / names.length }, (_, r) =>
    Object.fromEntries(names.map((name, c) => [name, cells[r * names.length + c]])));
}

const file = (name) => readFileSync(join(folder, String(name).split("/").pop()));

class XMLHttpRequest {
  open(_, name) {
    this.name = name;
  }
  send() {
    this.response = file(this.name);
  }
}

const worker = {
  console: { log() {}, warn: console.error, error: console.error }, WebAssembly, Uint8Array, TypeError, RangeError, TextDecoder, TextEncoder, URL,
  performance, setTimeout, clearTimeout, queueMicrotask, crypto,
  location: { href: "http://page/engine_bundle.js" },
  XMLHttpRequest, WorkerGlobalScope: class {}, importScripts() {}, navigator: { hardwareConcurrency: 1 },
};
worker.self = worker.globalThis = worker;
vm.runInNewContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), worker);

const answers = new Map();
let number_of_requests = 0;
const port = {
  postMessage(data) {
    for (const reply of of(fields(Buffer.from(data)), 1)) {
      const parts = fields(reply), [fatal] = of(parts, 5);
      if (fatal) throw new Error(String(fatal));
      // an answer to a query may come in parts
      answers.get(Number(of(parts, 3)[0])).push(parts);
    }
  },
};
worker.onmessage({ data: port });

function ask(method, ...arguments_) {
  answers.set(method, []);
  const request = Buffer.concat([number(1, ++number_of_requests), number(2, method), ...arguments_]);
  port.onmessage({ data: new Uint8Array(bytes(1, request)) });
}

const until = async (method) => {
  while (!answers.get(method)?.length) await new Promise((resolve) => setTimeout(resolve, 10));
  return answers.get(method);
};
// the bundle's module starts in the tasks that follow
await new Promise((resolve) => setTimeout(resolve, 50));
ask(APPEND, bytes(101, readFileSync(trace)));
const [appended] = await until(APPEND);
const problem = of(fields(of(appended, 201)[0] ?? Buffer.alloc(0)), 2).map(String)[0];
if (problem) throw new Error(problem);
ask(FINALIZE);
await until(FINALIZE);
const printed = [];
for (const sql of queries) {
  ask(QUERY, bytes(103, bytes(1, Buffer.from(sql))));
  printed.push(rows(Buffer.concat((await until(QUERY)).flatMap((parts) => of(parts, 203)))));
}
console.log(JSON.stringify(printed));
