// A JavaScript session inside a sandbox: the twin of kernel.py, for Node 18 or newer. Cells are JSON lines on stdin, what they do are JSON
// lines on stdout; a line that is not JSON (a child wrote it) is output. Nothing here is trusted by whoever reads it.
"use strict";
const repl = require("repl"), util = require("util"), fs = require("fs"), { PassThrough } = require("stream");

let cell = null, count = 0;
function send(type, fields) {
  let line = Buffer.from(JSON.stringify({ id: cell, type, ...fields }) + "\n");
  while (line.length) {
    try { line = line.subarray(fs.writeSync(1, line)); } catch (error) { if (error.code !== "EAGAIN") throw error; }
  }
}
for (const name of ["stdout", "stderr"])
  process[name].write = (data, encoding, done) => {
    send(name, { text: typeof data === "string" ? data : Buffer.from(data).toString(), timestamp: Date.now() * 1e6 });
    const then = typeof encoding === "function" ? encoding : done;
    if (then) then();
    return true;
  };

const session = repl.start({ input: new PassThrough(), output: new PassThrough(), prompt: "", terminal: false, useGlobal: true });
function show(value, main) {
  const result = { text: util.inspect(value, { depth: 4, maxArrayLength: 100 }), is_main_result: main };
  if (value && typeof value === "object")
    try { result.json = JSON.parse(JSON.stringify(value)); } catch { /* what has a cycle has no JSON */ }
  send("result", result);
}
globalThis.display = (...values) => { for (const value of values) show(value, false); };

let fail = null;                       // of the cell that runs: what is thrown in it goes to the session's domain, not to the callback
if (session._domain) session._domain.removeAllListeners("error").on("error", error => fail && fail(error));
function run(code) {
  return new Promise((resolve, reject) => {
    fail = reject;
    session.eval(code + "\n", session.context, `cell-${count}`, (error, value) => error ? reject(error.err || error) : resolve(value));
  });
}

async function serve(message) {
  const before = {};
  for (const [name, value] of Object.entries(message.env_vars || {})) {
    before[name] = process.env[name];
    process.env[name] = value;
  }
  cell = message.id;
  count++;
  send("number_of_executions", { execution_count: count });
  try {
    const value = await run(message.code);
    if (value !== undefined) show(value, true);
  } catch (error) {
    const known = error instanceof Error || (error && error.stack);
    send("error", { name: known ? error.name : "Error", value: known ? String(error.message) : util.inspect(error), traceback: known ? String(error.stack) : "" });
  }
  for (const [name, value] of Object.entries(before))
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  send("end", {});
}
process.on("SIGINT", () => fail && fail(new Error("interrupted")));
process.on("uncaughtException", error => send("stderr", { text: `${error && error.stack || error}\n`, timestamp: Date.now() * 1e6 }));

let rest = "", turn = Promise.resolve();
process.stdin.setEncoding("utf8");
process.stdin.on("data", data => {
  const lines = (rest + data).split("\n");
  rest = lines.pop();
  for (const line of lines) turn = turn.then(() => serve(JSON.parse(line)));
});
process.stdin.on("end", () => process.exit(0));
send("ready", { cwd: process.cwd() });
