// Runs in a module worker: loads Pyodide, then judges one answer a message.
//
//   in   {base, files, runner}                        once: where Pyodide is, its hashes, the text of runner.py
//        {answer, starter, statement, tests}          an answer to judge
//   out  {ready: true}, {event: ...} as runner.judge yields them, {done: true}, {fatal: sentence}

let judge;

async function load({ base, files, runner }) {
  // Every file is checked against its hash, whoever asks for it.
  const plain = self.fetch.bind(self);
  self.fetch = (url, options) => {
    const name = String(url.url || url).split("/").pop();
    return plain(url, name in files ? { ...options, integrity: files[name] } : options);
  };
  const module = async (name) => {
    const source = await (await self.fetch(base + name)).text();
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    try { return await import(url); } finally { URL.revokeObjectURL(url); }
  };
  const [{ loadPyodide }, { default: createPyodideModule }] =
    await Promise.all([module("pyodide.mjs"), module("pyodide.asm.mjs")]);
  const python = await loadPyodide({ indexURL: base, createPyodideModule, stdin: () => null });
  python.FS.writeFile("/home/pyodide/runner.py", runner);
  python.globals.set("send", (text) => self.postMessage(JSON.parse(text)));
  python.runPython(`
import json, sys
sys.path.insert(0, "/home/pyodide")
import runner

def judge(answer, starter, statement, tests):
    for event in runner.judge(answer, "answer.py", starter, statement, tests):
        send(json.dumps(event))
`);
  judge = python.globals.get("judge");
}

self.onmessage = async ({ data }) => {
  try {
    if (data.base) {
      await load(data);
      self.postMessage({ ready: true });
    } else {
      judge(data.answer, data.starter, data.statement, data.tests);
      self.postMessage({ done: true });
    }
  } catch (error) {
    self.postMessage({ fatal: String(error.message || error).trim().split("\n").pop() });
  }
};
