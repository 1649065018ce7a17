// Runs labkit's own Python (answers.py) in a thread of its own, so that the page never waits for it.
const here = new URL(".", self.location.href);
const say = (text) => self.postMessage({ text });

async function start() {
  const { runtime, packages } = await (await fetch(new URL("runtime.json", here))).json();
  const sources = fetch(new URL("labkit.zip", here)); // while Python starts
  say("Loading Python and numpy");
  const { loadPyodide } = await import(new URL(`${runtime}pyodide.mjs`, here).href);
  const python = await loadPyodide({ packageBaseUrl: new URL(packages, here).href, packages: ["numpy"] });
  if (!python.loadedPackages.numpy)
    throw new Error(`numpy could not be loaded from ${new URL(packages, here).host}, so labkit cannot compute here.`);
  say("Reading labkit");
  python.unpackArchive(await (await sources).arrayBuffer(), "zip", { extractDir: "/labkit" });
  python.runPython("import sys; sys.path.insert(0, '/labkit')");
  return python.pyimport("answers").answer;
}

const ready = start();
ready.catch((error) => self.postMessage({ failed: error.message }));

self.onmessage = async ({ data: { id, kind, request } }) => {
  const answer = await ready;
  try {
    self.postMessage({ id, answer: answer(kind, request) });
  } catch (error) {
    self.postMessage({ id, answer: JSON.stringify({ problem: error.message.trim().split("\n").pop() }) });
  }
};
