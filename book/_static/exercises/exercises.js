// The exercise pages: run an answer in a worker, show what came, remember answers and progress in this browser.

(() => {
  const { exercises, parts, runner, worker: workerSource, files, cdn, local, limit } = window.PRACTICE;
  const here = new URL(".", document.currentScript.src);
  const TOO_LONG = `no end after ${limit} seconds: an endless loop, or far too slow`;

  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false && value != null) made.setAttribute(key, value);
    }
    made.append(...children.flat().filter((child) => child != null));
    return made;
  };

  // ------------------------------------------------------------------------------------------- storage

  const KEY = "paged-practice";
  const store = {
    read() {
      let found = {};
      try { found = JSON.parse(localStorage.getItem(KEY)) || {}; } catch { /* no storage, or not ours */ }
      return { answers: {}, solved: {}, hints: {}, ...found };
    },
    change(edit) {
      const all = store.read();
      edit(all);
      try { localStorage.setItem(KEY, JSON.stringify(all)); return true; } catch { return false; }
    },
  };

  // The next exercise that is not solved: of the same part of the book, later ones first; else of the others.
  const following = (name) => {
    const names = Object.keys(exercises), { solved } = store.read();
    const here = names.indexOf(name);
    const open = [...names.slice(here + 1), ...names.slice(0, here)].filter((other) => !solved[other]);
    return open.find((other) => parts[other] === parts[name]) ?? open[0];
  };

  // --------------------------------------------------------------------------------------------- worker

  // One worker serves all runs of a page. A run that does not end is ended with its worker.
  const python = {
    worker: null,
    ready: null,
    start() {
      // Opened from a file, a page may neither start such a worker from a blob nor read the files beside it:
      // then the worker's text is its address, and Pyodide comes from the CDN.
      const fromFile = location.protocol === "file:";
      const url = fromFile ? `data:text/javascript,${encodeURIComponent(workerSource)}`
        : URL.createObjectURL(new Blob([workerSource], { type: "text/javascript" }));
      const worker = this.worker = new Worker(url, { type: "module" });
      const base = local && !fromFile ? new URL("pyodide/", here).href : cdn;
      this.ready = new Promise((resolve, reject) => {
        worker.onerror = (event) => reject(new Error(event.message || "the worker could not be started"));
        worker.onmessage = ({ data }) => data.ready ? resolve() : reject(new Error(data.fatal));
      });
      this.ready.catch(() => {});
      worker.postMessage({ base, files, runner });
    },
    stop() {
      this.worker?.terminate();
      this.worker = this.ready = null;
    },
    async run(job, onEvent) {
      if (!this.worker) this.start();
      try { await this.ready; } catch (error) { this.stop(); throw error; }
      const { worker } = this;
      return new Promise((resolve, reject) => {
        worker.onmessage = ({ data }) => {
          if (data.done) resolve();
          else if (data.fatal) reject(new Error(data.fatal));
          else onEvent(data);
        };
        worker.onerror = (event) => reject(new Error(event.message));
        onEvent({ event: "started" });
        worker.postMessage(job);
      });
    },
  };

  // ---------------------------------------------------------------------------------------- one exercise

  class Workbench {
    constructor(root) {
      this.root = root;
      this.job = JSON.parse(root.querySelector("script").textContent);
      this.running = null;
      const saved = store.read().answers[this.job.name];
      this.runButton = element("button", { type: "button", class: "run", onclick: () => this.run() }, "Run");
      this.stopButton = element("button",
        { type: "button", class: "stop", hidden: true, onclick: () => this.stop() }, "Stop");
      this.resetButton = element("button", { type: "button", onclick: () => this.reset() }, "Reset");
      this.status = element("span", { class: "status", role: "status" });
      const box = element("div");
      this.results = element("div", { class: "results", tabindex: "-1" });
      root.append(
        box,
        element("div", { class: "bar" }, this.runButton, this.stopButton, this.resetButton, this.status),
        element("p", { class: "keys" }, "Ctrl+Enter runs. Tab indents; Esc, then Tab leaves the editor."),
        this.results);
      this.editor = new window.PracticeEditor(box, saved ?? this.job.starter, {
        label: `Your answer to: ${exercises[this.job.name]}`,
        onRun: () => this.run(),
        onChange: (text) => this.save(text),
      });
      const task = document.querySelector(".practice-task");
      for (const [key, value] of [["tabindex", 0], ["role", "region"], ["aria-label", "Statement"]]) task?.setAttribute(key, value);
      if (store.read().solved[this.job.name]) this.say("Solved before. Your answer is as you left it.");
      const details = [...document.querySelectorAll(".bd-article details, article details")];
      details.filter((found) => found.querySelector(".practice-hint")).forEach((found, index) => {
        found.addEventListener("toggle", () => found.open && store.change((all) => {
          all.hints[this.job.name] = Math.max(index + 1, all.hints[this.job.name] || 0);
        }));
      });
    }

    say(text) { this.status.textContent = text; }

    save(text) {
      const kept = store.change((all) => { all.answers[this.job.name] = text; });
      if (!kept) this.say("This browser keeps no data: your answer is lost when the page is closed.");
    }

    reset() {
      if (this.editor.text !== this.job.starter
          && !confirm("Put the starter in the place of your answer? Undo brings it back.")) return;
      this.editor.text = this.job.starter;
      this.results.replaceChildren();
      this.say("");
    }

    async run() {
      if (this.running) return;
      const run = this.running = { cases: [], case: null, call: null, began: performance.now() };
      this.runButton.disabled = true;
      this.stopButton.hidden = false;
      this.say(python.worker ? "Running …" : "Starting Python …");
      let timer;
      const ended = new Promise((resolve) => { run.end = resolve; });
      try {
        await Promise.race([ended, python.run({ answer: this.editor.text, ...this.job }, (event) => {
          if (event.event === "started") {
            this.say("Running …");
            run.began = performance.now();
            timer = setTimeout(() => this.stop(TOO_LONG), 1000 * limit);
          } else if (event.event === "case") [run.case, run.call] = [event.case, null];
          else if (event.event === "step") run.call = event.call;
          else if (event.event === "problem") run.problem = event;
          else if (event.event === "result") { run.cases.push(event); run.case = null; }
        })]);
      } catch (error) {
        python.stop();
        const began = run.case !== null || run.call;
        const how = !began && location.protocol === "file:" ? ". A page opened from a file gets Python from the network. "
          + "Without a network, serve the pages: python -m http.server in their folder, then open http://localhost:8000" : "";
        this.interrupted(run,
          `${began ? "the answer crashed Python" : "Python could not be loaded"}: ${error.message}${how}`);
      }
      clearTimeout(timer);
      this.running = null;
      this.runButton.disabled = false;
      if (document.activeElement === this.stopButton) this.runButton.focus();
      this.stopButton.hidden = true;
      this.show(run);
      if (run.cases.some((found) => /MemoryError/.test(found.error || ""))) python.stop();
    }

    // End the run by ending its worker; a new one starts at once, so that the next run need not wait.
    stop(sentence = "stopped by you") {
      const run = this.running;
      if (!run) return;
      python.stop();
      python.start();
      this.interrupted(run, sentence);
      run.end();
    }

    interrupted(run, sentence) {
      if (run.case === null) run.problem = { sentence, trace: [], printed: "" };
      else run.cases.push({ case: run.case, passed: false, before: [], call: run.call, error: sentence });
    }

    show(run) {
      const failed = run.cases.filter((found) => !found.passed);
      const seconds = ((performance.now() - run.began) / 1000).toFixed(1);
      if (run.problem) {
        this.say("The answer could not be judged.");
        this.results.replaceChildren(element("div", { class: "failure" },
          element("pre", {}, run.problem.sentence), this.frames(run.problem.trace), this.printed(run.problem)));
        return;
      }
      const [count, passed] = [run.cases.length, run.cases.length - failed.length];
      this.say(`${failed.length ? `${passed} of ${count}` : `Solved: all ${count}`} cases pass (${seconds} s).`);
      const list = element("ul", { class: "cases" });
      for (const found of run.cases) {
        const name = `${found.passed ? "✓" : "✗"} ${found.case}`;
        list.append(element("li", { class: found.passed ? "passed" : "failed" }, found.passed ? name :
          element("details", { class: "case", open: found === failed[0] },
            element("summary", {}, name), this.failure(found))));
      }
      this.results.replaceChildren(list);
      if (!failed.length) this.solved();
    }

    solved() {
      store.change((all) => { all.solved[this.job.name] ??= new Date().toISOString().slice(0, 10); });
      const why = document.querySelector(".practice-explanation");
      const next = following(this.job.name);
      this.results.prepend(element("div", { class: "success" }, element("p", {}, element("strong", {}, "Solved.")),
        why ? [...why.cloneNode(true).childNodes] : null,
        next && element("p", {}, "Next: ", element("a", { href: `${next}.html` }, exercises[next]))));
    }

    failure(found) {
      const rows = element("dl");
      const row = (name, text, kind = "") => text != null &&
        rows.append(element("dt", {}, name), element("dd", {}, element("pre", { class: kind }, text)));
      const left = Math.max(0, found.before.length - 12);
      const before = [...(left ? [`# ${left} statements`] : []), ...found.before.slice(left)];
      row("after", before.length ? before.join("\n") : null, "muted");
      row("call", found.call ?? "(before the first call)");
      row("expected", found.expected, "good");
      row("got", found.got, "bad");
      if (found.note !== `expected ${found.expected}, got ${found.got}`) row("that is", found.note);
      row("error", found.error, "bad");
      return element("div", { class: "failure" }, rows, this.frames(found.trace), this.printed(found));
    }

    frames(trace = []) {
      return trace.map(({ line, function: name, source }) => element("p", { class: "frame" },
        element("button", { type: "button", class: "line", onclick: () => this.editor.show(line) }, `line ${line}`),
        ` in ${name}: `, element("code", {}, source)));
    }

    printed(found) {
      return found.printed ? [element("p", {}, "printed"), element("pre", {}, found.printed)] : null;
    }
  }

  // ------------------------------------------------------------------------------------------- progress

  class Progress {
    constructor(root) {
      this.root = root;
      this.summary = root.querySelector(".practice-summary");
      this.message = element("p", { role: "status" });
      this.file = element("input",
        { type: "file", accept: ".json,.py", multiple: true, hidden: true, onchange: () => this.bring() });
      root.append(element("div", { class: "bar" },
        element("button", { type: "button", onclick: () => this.export() }, "Export"),
        element("button", { type: "button", onclick: () => this.file.click() }, "Import"), this.file), this.message);
      this.draw();
      window.addEventListener("storage", () => this.draw());
    }

    draw() {
      const { answers, solved } = store.read();
      const names = Object.keys(exercises);
      const count = names.filter((name) => solved[name]).length;
      this.summary.replaceChildren(
        element("progress", { max: names.length, value: count, "aria-label": "solved" }),
        ` ${count} of ${names.length} solved`);
      for (const row of this.root.querySelectorAll("tr[data-exercise]")) {
        const name = row.dataset.exercise;
        const state = solved[name] ? "solved" : answers[name] ? "started" : "open";
        const cell = row.querySelector(".state");
        cell.textContent = { solved: "✓", started: "…", open: "·" }[state];
        cell.setAttribute("aria-label", state);
        row.className = state;
      }
    }

    export() {
      const text = JSON.stringify({ format: "paged-practice", ...store.read() }, null, 1) + "\n";
      const link = element("a", { download: "paged-practice.json",
        href: URL.createObjectURL(new Blob([text], { type: "application/json" })) });
      link.click();
      this.message.textContent = "In a clone of the repository: python practice/judge.py import paged-practice.json";
    }

    // An export of the terminal or of another browser, or single answers NAME.py from the folder of answers.
    async bring() {
      const incoming = { answers: {}, solved: {}, hints: {} }, refused = [];
      for (const file of this.file.files) {
        const text = await file.text(), name = file.name.replace(/\.py$/, "");
        if (file.name.endsWith(".py") && name in exercises) incoming.answers[name] = text;
        else {
          try {
            const data = JSON.parse(text);
            const known = data.format === "paged-practice" || file.name === "progress.json";
            if (!known) throw new Error();
            for (const key of Object.keys(incoming)) Object.assign(incoming[key], data[key]);
          } catch { refused.push(file.name); }
        }
      }
      this.file.value = "";
      const mine = store.read();
      const names = Object.keys(exercises).filter((name) => typeof incoming.answers[name] === "string");
      const differ = names.filter((name) => mine.answers[name] && mine.answers[name] !== incoming.answers[name]);
      const replace = differ.length > 0
        && confirm(`Answers here are different: ${differ.join(", ")}. Put the imported ones in their place?`);
      const taken = names.filter((name) => replace || !differ.includes(name));
      store.change((all) => {
        for (const name of taken) all.answers[name] = incoming.answers[name];
        for (const key of ["solved", "hints"]) {
          for (const [name, value] of Object.entries(incoming[key])) {
            if (name in exercises && (replace || !differ.includes(name))) all[key][name] ??= value;
          }
        }
      });
      this.draw();
      const kept = names.length - taken.length;
      this.message.textContent = `${taken.length} answers imported${kept ? `, ${kept} kept as they were here` : ""}.`
        + (refused.length ? ` Not an export: ${refused.join(", ")}.` : "");
    }
  }

  document.querySelectorAll(".practice").forEach((root) => new Workbench(root));
  document.querySelectorAll(".practice-progress").forEach((root) => new Progress(root));
})();
