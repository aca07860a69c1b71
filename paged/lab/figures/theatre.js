// The theatre: a recorded run of the engine as linked panels. data: {scenes: [recording], sources, page}; see
// paged/lab/theatre. The sentences stand in the static part of root, one list item a beat.
function theatre(root, data) {
  const PHASES = ["schedule", "move", "write", "read", "sample", "release"];
  const reduced = matchMedia("(prefers-reduced-motion: reduce)");
  const make = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  };
  const div = (name, ...children) => make("div", {class: name}, ...children);
  const span = (name, ...children) => make("span", {class: name}, ...children);
  const listed = (things) => things.length > 1 ? things.slice(0, -1).join(", ") + " and " + things[things.length - 1] : String(things[0]);
  const slugged = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");

  // ── the recordings, replayed once
  function apply(old, change) {
    if (change === null) return old;
    if (Array.isArray(change)) return change[0];
    if (Array.isArray(old)) {
      const items = old.slice();
      for (const [key, item] of Object.entries(change)) {
        if (key === "+") items.push(...item);
        else if (key === "@") items.splice(item[0], item[1], ...item[2]);
        else items[key] = apply(old[key], item);
      }
      return items;
    }
    const copy = Object.assign({}, old);
    for (const [key, value] of Object.entries(change)) {
      if (value === 0) delete copy[key];
      else copy[key] = apply(copy[key], value);
    }
    return copy;
  }
  const sections = [...root.querySelectorAll("section[data-run]")];
  const runs = data.scenes.map((recording, number) => {
    let state = {};
    const says = [...sections[number].querySelectorAll("ol > li")].map((item) => item.textContent);
    const beats = recording.beats.map((beat, i) => {
      state = apply(state, beat.set);
      return Object.assign({}, beat, {state, say: says[i]});
    });
    const used = new Set();
    let step = -1, wrote = false, base = {};  // what each request had computed when this step was scheduled
    beats.forEach((beat, i) => {
      // A request that leaves still has its table while it gives up block after block.
      const last = i && beats[i - 1].leaves === beat.leaves ? beats[i - 1].gone : [];
      beat.gone = beat.leaves ? [...last, ...(beat.fields.blocks || [beat.fields.block])] : [];
      if (beat.step !== step) { step = beat.step; base = {}; wrote = false; }
      wrote = wrote || beat.event === "WRITE";
      beat.wrote = wrote;
      if (beat.event.startsWith("SCHEDULE_")) beat.fields.requests.forEach((name) => { base = Object.assign({}, base, {[name]: beat.state.requests[name].computed}); });
      beat.base = base;
    });
    beats.forEach((beat) => beat.state.ref.forEach((count, block) => { if (count) used.add(block); }));
    const address = recording.slug + (recording.fault ? "+" + slugged(recording.fault.name) : "");
    return Object.assign({}, recording, {beats, used, address});
  });
  const scenes = runs.filter((run) => !run.fault);
  const planted = (run) => runs.filter((other) => other.fault && other.slug === run.slug);

  let run = scenes[0] || runs[0], at = 0, timer = null, predicting = false, asked = null, shownFrame = null, focused = null;
  const beat = () => run.beats[at];
  const size = () => run.sizes.block_size;
  const word = (token) => token < 0 ? "…" : ((run.words[token] ?? "?").replace(/\n/g, "⏎").replace(/^ /, "") || "␣");

  // ── the fixed parts
  const tabs = div("scenes"), say = make("p", {class: "say", "aria-live": "polite"}), phase = span("phase");
  const ask = div("ask"), fault = div("fault"), select = make("select", {"aria-label": "Plant a fault"});
  const predict = make("button", {type: "button", class: "predict", "aria-pressed": "false", title: "Ask me before it is shown",
    onclick: () => { predicting = !predicting; predict.setAttribute("aria-pressed", predicting); asked = null; show(); }}, "Predict");
  const button = (label, name, action) => make("button", {type: "button", "aria-label": name, title: name, onclick: action}, label);
  const previous = button("‹", "Previous beat (←)", () => go(at - 1)), next = button("›", "Next beat (→)", () => go(at + 1));
  const play = button("▶", "Play (Space)", () => toggle());
  play.className = "play";
  const slider = make("input", {type: "range", min: 0, value: 0, "aria-label": "Beat", oninput: (event) => go(Number(event.target.value))});
  const roll = div("roll"), steps = div("steps"), count = span("count"), legend = div("legend");
  const panel = (name, title, note) => {
    const head = make("h4", {}, span("title", title)), aside = span("note", note || ""), body = div("inside");
    head.append(aside);
    const element = make("div", {class: "panel " + name, role: "group", "aria-label": title}, head, body);
    return {element, aside, body, name};
  };
  const scheduler = panel("scheduler", "Scheduler"), requests = panel("requests", "Requests and their block tables", "logical → physical");
  const memory = panel("memory", "K/V memory"), code = panel("code", "The line that runs");
  const log = panel("log", "Events"), map = panel("map", "Requests × steps", "tokens in each step");
  const sumLine = span("sum");
  memory.aside.replaceWith(sumLine);
  const wires = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  wires.setAttribute("class", "wires");
  wires.setAttribute("aria-hidden", "true");
  const stage = make("div", {class: "stage"}, wires, requests.element, scheduler.element, memory.element,
    div("side", code.element, log.element, map.element));
  const views = {Memory: [memory], Requests: [requests], Scheduler: [scheduler, map], Code: [code, log]};
  const viewTabs = div("views");
  const tables = make("div", {class: "hidden"}), beats = make("ol"), details = make("details", {class: "beats"}, make("summary", {}, "All beats of this scene, as a list"), beats);
  const bar = div("transport", previous, play, next, legend, div("scrub", div("track", roll, slider), steps), count);
  const note = span("note"), foot = div("foot", details, note, span("hint", "← → beat · Shift step · Home End · Space plays"));
  const app = div("app", div("top", tabs, div("tools", predict, select)), fault, div("words", phase, say), ask, bar, viewTabs, stage, tables, foot);
  root.prepend(app);
  root.classList.add("on");
  legend.append(...PHASES.map((name) => span("key " + name, make("i"), name)));

  scenes.forEach((scene) => tabs.append(make("button", {type: "button", role: "tab", title: scene.line, onclick: () => open(scene, 0, true)}, scene.title)));
  if (scenes.length < 2) tabs.append(span("line", run.line));
  tabs.setAttribute("role", "tablist");
  tabs.setAttribute("aria-label", "Scenes");
  if (scenes.length < 2) tabs.classList.add("single");
  select.hidden = runs.length === scenes.length;
  Object.keys(views).forEach((name) => viewTabs.append(make("button", {type: "button", "aria-pressed": "false", onclick: () => { view = name; layout(); }}, name, make("i", {class: "dot"}))));
  let view = "Memory";
  select.addEventListener("change", () => { const other = runs[Number(select.value)]; open(other, failing(other), true); });

  // ── going about
  const failing = (other) => other.fault ? Math.max(0, other.beats.findIndex((b) => b.fields.wrong || b.event === "FAILED")) : 0;
  function open(other, beatNumber, byReader) {
    stop();
    run = other;
    at = Math.max(0, Math.min(other.beats.length - 1, beatNumber));
    asked = shownFrame = null;
    const faults = planted(run), scene = scenes.find((s) => s.slug === run.slug) || run;
    [...tabs.querySelectorAll("button")].forEach((tab, i) => {
      const selected = scenes[i].slug === run.slug;
      tab.setAttribute("aria-selected", selected);
      if (selected) tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - tab.offsetWidth) / 2;  // and never the page
    });
    select.replaceChildren(make("option", {value: runs.indexOf(scene)}, faults.length ? "Plant a fault…" : "No fault here"),
      ...faults.map((f) => make("option", {value: runs.indexOf(f)}, f.fault.name)));
    select.value = runs.indexOf(run);
    select.disabled = !faults.length;
    predict.hidden = !run.beats.some((b) => b.ask);
    note.textContent = (run.sizes.layer !== null ? `bars: K of layer ${run.sizes.layer}, one of ${run.sizes.num_layers}` : "no model, so no K") + (run.sizes.prefix_cache === "off" ? "" : " · ◆ the prefix cache finds it");
    drawFault();
    drawRoll();
    drawBeats();
    show(byReader);
  }
  function go(number) {
    stop();
    move(number);
  }
  function move(number) {
    number = Math.max(0, Math.min(run.beats.length - 1, number));
    if (predicting && asked === null && number === at + 1 && run.beats[number].ask) {
      asked = {number, chosen: null};
      return show(true);
    }
    at = number;
    asked = shownFrame = null;
    show(true);
  }
  const stepStart = (number) => run.beats.findIndex((b) => b.step === run.beats[number].step);
  function goStep(direction) {
    const start = stepStart(at);
    if (direction < 0) return go(at > start ? start : start > 0 ? stepStart(start - 1) : 0);
    const following = run.beats.findIndex((b, i) => i > at && b.step !== beat().step);
    go(following < 0 ? run.beats.length - 1 : following);
  }
  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "▶";
    play.setAttribute("aria-label", "Play (Space)");
    say.setAttribute("aria-live", "polite");
  }
  function toggle() {
    if (timer !== null) return stop();
    if (at === run.beats.length - 1) move(0);
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "Pause (Space)");
    say.setAttribute("aria-live", "off");
    const wait = () => { timer = setTimeout(tick, 600 + 55 * say.textContent.length); };
    const tick = () => {
      move(at + 1);
      if (asked !== null || at === run.beats.length - 1) stop();
      else wait();
    };
    wait();
  }
  new IntersectionObserver((entries) => { if (!entries[0].isIntersecting && timer !== null) stop(); }).observe(root);

  document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); });

  // ── the scrubber: a lane a phase, a column a beat
  function drawRoll() {
    const total = run.beats.length;
    slider.max = total - 1;
    roll.replaceChildren(...run.beats.map((b, i) => make("i", {
      class: b.phase + (b.fields.wrong || b.event === "FAILED" ? " wrong" : "") + (i && b.step !== run.beats[i - 1].step ? " first" : ""),
      style: "--lane:" + PHASES.indexOf(b.phase)})));
    slider.style.setProperty("--thumb", 100 / total + "%");
    steps.replaceChildren();
    const width = roll.clientWidth || 600;
    let free = -1;
    run.beats.forEach((b, i) => {
      if (b.step === 0 || (i && b.step === run.beats[i - 1].step)) return;
      const left = i / total * width;
      if (left < free) return;
      const label = make("span", {style: `left:${100 * i / total}%`}, (free < 0 ? "step " : "") + b.step);
      free = left + (free < 0 ? 48 : 20);
      steps.append(label);
    });
  }
  function drawBeats() {
    beats.replaceChildren(...run.beats.map((b, i) => make("li", {}, make("button", {type: "button", onclick: () => go(i)}, b.say))));
  }
  function drawFault() {
    root.classList.toggle("planted", Boolean(run.fault));
    fault.hidden = !run.fault;
    if (!run.fault) return;
    const f = run.fault, bad = failing(run);
    fault.replaceChildren(
      div("why", make("b", {}, "Planted: " + f.name + ". "), "“" + f.why + "”"),
      div("verdict", make("b", {}, "The oracle: "), f.verdict.replace(/^./, (c) => c.toUpperCase()), " ",
        make("button", {type: "button", onclick: () => go(bad)}, "show it")),
      make("table", {}, make("caption", {}, f.error ? "A user sees: " + f.error : "What the users see"),
        make("thead", {}, make("tr", {}, ["", "should get", "gets"].map((t) => make("th", {scope: "col"}, t)))),
        make("tbody", {}, f.rows.map(([name, right, got]) => make("tr", {class: right === got ? "" : "differs"},
          make("th", {scope: "row"}, name), make("td", {}, right.trim() || "–"),
          make("td", {}, got.trim() || "nothing", right === got ? span("same", " the same") : span("other", " ✗")))))));
  }

  // ── one beat
  let before = {};
  function show(byReader) {
    const b = beat(), state = b.state, focusKey = root.contains(document.activeElement) && document.activeElement.dataset ? document.activeElement.dataset.key : null;
    before = at ? run.beats[at - 1].state : state;
    const wrong = b.fields.wrong || b.event === "FAILED";
    say.textContent = b.say;
    phase.textContent = wrong ? "wrong" : b.phase;
    phase.className = "phase " + (wrong ? "bad" : b.phase);
    drawAsk();
    [...roll.children].forEach((tick, i) => { tick.classList.toggle("at", i === at); tick.classList.toggle("done", i < at); });
    [...legend.children].forEach((key) => key.classList.toggle("now", key.classList.contains(b.phase)));
    slider.value = at;
    slider.setAttribute("aria-valuetext", `step ${b.step}, beat ${at + 1} of ${run.beats.length}: ${b.phase}`);
    count.textContent = `step ${b.step} · ${at + 1}/${run.beats.length}`;
    previous.disabled = at === 0;
    next.disabled = at === run.beats.length - 1;
    [...beats.children].forEach((item, i) => item.toggleAttribute("aria-current", i === at));
    touched = touchedBy(b);
    drawScheduler(state);
    drawRequests(state);
    drawMemory(state);
    drawCode(b);
    drawLog();
    drawMap();
    drawTables(state);
    markViews();
    link(null);
    drawWires();
    if (focusKey) { const element = root.querySelector(`[data-key="${focusKey}"]`); if (element) element.focus({preventScroll: true}); }
    if (byReader && data.addresses) history.replaceState(null, "", `#theatre/${run.address}/${at + 1}`);
  }

  // What an event touches: {blocks, sources, written: slot -> request, read: Set of slots, wrong: Set of slots, copies}
  let touched = null;
  function touchedBy(b) {
    const f = b.fields, t = {blocks: new Set(), sources: new Set(), written: new Map(), read: new Set(), wrong: new Set(), copies: [], requests: new Set()};
    if (f.block !== undefined) t.blocks.add(f.block);
    if (Array.isArray(f.blocks)) f.blocks.forEach((block) => t.blocks.add(block));
    if (b.event === "KV_BLOCK_COPY") t.copies.push([f.source, f.block]);
    if (b.event === "MOVE") f.copies.forEach((pair) => t.copies.push(pair));
    t.copies.forEach(([from, to]) => { t.sources.add(from); t.blocks.add(to); });
    if (b.event === "SWAP_OUT") f.pairs.forEach(([block]) => t.blocks.add(block));
    if (b.event === "SWAP_IN") f.pairs.forEach(([, block]) => t.blocks.add(block));
    if (b.event === "MOVE") { f.swap_out.forEach(([block]) => t.sources.add(block)); f.swap_in.forEach(([, block]) => t.blocks.add(block)); }
    if (b.event === "WRITE") {
      let k = 0;
      f.requests.forEach((request, i) => { for (let n = 0; n < f.counts[i]; n++) t.written.set(f.slots[k++], request); });
    }
    if (b.event === "READ") f.requests.forEach((request, i) => {
      for (let p = 0; p < f.lengths[i]; p++) {
        const block = f.tables[i][Math.floor(p / size())];
        if (block !== undefined) t.read.add(block * size() + p % size());
      }
    });
    (f.wrong || []).forEach(([, , slot]) => slot !== null && t.wrong.add(slot));
    (f.requests || (f.request ? [f.request] : [])).forEach((request) => t.requests.add(request));
    return t;
  }

  function drawAsk() {
    ask.hidden = asked === null;
    say.parentNode.hidden = asked !== null && asked.chosen === null;
    if (asked === null) return;
    const b = run.beats[asked.number], question = b.ask;
    const options = question.options.map((option, i) => {
      const chosen = asked.chosen === i, right = question.answer === i, done = asked.chosen !== null;
      return make("button", {type: "button", class: "option" + (done && right ? " right" : done && chosen ? " missed" : ""), "aria-pressed": chosen,
        disabled: done ? "" : undefined, onclick: () => { asked.chosen = i; show(); ask.querySelector(".go").focus(); }},
        make("kbd", {}, i + 1), " " + option + (done && right ? " ✓" : done && chosen ? " ✗" : ""));
    });
    const parts = [make("b", {}, question.question), div("options", options)];
    if (asked.chosen !== null) {
      say.textContent = (asked.chosen === question.answer ? "Yes. " : "No: " + question.options[question.answer] + ". ") + b.say;
      parts.push(make("button", {type: "button", class: "go", onclick: () => go(asked.number)}, "Show it ›"));
    } else parts.push(make("button", {type: "button", class: "skip", onclick: () => go(asked.number)}, "Skip ›"));
    ask.replaceChildren(...parts);
  }

  // ── panels
  const badge = (request, more) => span("badge" + (more ? " " + more : ""), request);
  const given = (name, block) => beat().leaves === name && beat().gone.includes(block);
  const holdersOf = (state, block) => Object.keys(state.requests).filter((name) => state.requests[name].status === "running" && state.requests[name].table.includes(block) && !given(name, block));
  function drawScheduler(state) {
    const b = beat(), queued = new Set([...state.waiting, ...state.running]);
    const names = Object.keys(state.requests), of = (status) => names.filter((name) => !queued.has(name) && state.requests[name].status === status);
    const swapped = state.waiting.filter((name) => state.requests[name].status === "swapped");
    const lane = (title, present, between) => div("lane", make("b", {}, title), div("seats",
      present.map((name) => make("span", {class: "badge" + (touched.requests.has(name) ? " hot" : ""), "data-key": "r:" + name, tabindex: -1}, name)),
      between.map((name) => make("span", {class: "badge between", title: "in no queue for a moment"}, name))));
    const budget = run.sizes.max_num_batched_tokens, scheduled = Object.entries(state.scheduled);
    const tokens = scheduled.reduce((sum, [, n]) => sum + n, 0), free = state.queue.length, total = state.ref.length;
    const shared = state.ref.filter((n) => n > 1).length, held = total - free;
    const meter = (label, value, ...parts) => div("meter", span("label", label), ...parts, make("b", {}, value));
    const bar = (...parts) => div("bar", ...parts);
    const part = (name, share, text, title) => make("i", {class: name, style: `width:${100 * share}%`, title}, share > 0.16 * text.length ? text : "");
    scheduler.aside.textContent = "step " + b.step;
    const lanes = [lane("waiting", state.waiting.filter((name) => !swapped.includes(name)), of("waiting")), lane("running", state.running, of("running"))];
    if (run.sizes.preemption === "swap") lanes.push(lane("swapped", swapped, of("swapped")));
    lanes.push(lane("ended", of("finished"), []));
    scheduler.body.replaceChildren(...lanes,
      meter("tokens", `${tokens} of ${budget}`, bar(scheduled.map(([name, n]) => part("new cut", Math.min(1, n / budget), name, `${name}: ${n}`)))),
      meter("blocks", `${held} of ${total}`, bar(part("used", (held - shared) / total, String(held - shared), `${held - shared} held once`), part("shared", shared / total, String(shared), `${shared} shared`))),
      meter("seats", `${state.seats} of ${run.sizes.max_num_seqs}`, div("chairs", Array.from({length: Math.min(6, run.sizes.max_num_seqs)}, (_, i) => make("i", {class: i < state.seats ? "taken" : ""})))));
  }

  function drawRequests(state) {
    const b = beat(), rows = [], ended = [];
    for (const [name, r] of Object.entries(state.requests)) {
      if (r.status === "finished") { ended.push([name, r]); continue; }
      const cells = Math.max(Math.ceil(r.tokens.length / size()), r.table.length), blocks = [];
      const sampled = b.event === "SAMPLE" ? (b.fields.tokens.find(([request]) => request === name) || [])[1] : undefined;
      const base = b.base[name], fresh = base === undefined ? -1 : base + (state.scheduled[name] || 0);
      for (let index = 0; index < cells; index++) {
        const tokens = [];
        for (let offset = 0; offset < size(); offset++) {
          const position = index * size() + offset, token = r.tokens[position];
          const ghost = token === undefined && position === r.tokens.length && sampled !== undefined;
          let kind = token === undefined ? (ghost ? "ghost" : "none") : position >= base && position < fresh ? "fresh" : position < Math.min(r.cached, r.computed) ? "cached" : position < r.computed ? "computed" : "pending";
          const slot = r.table[index] === undefined ? undefined : r.table[index] * size() + offset;
          if (slot !== undefined && touched.written.get(slot) === name && token !== undefined) kind += " writing";
          if (slot !== undefined && touched.wrong.has(slot) && (b.fields.wrong || []).some(([request, p]) => request === name && p === position)) kind += " wrong";
          tokens.push(make("span", {class: "token " + kind, "data-key": token === undefined ? undefined : `t:${name}:${position}`, tabindex: token === undefined ? undefined : -1,
            title: token === undefined ? undefined : `${word(token)} · ${describe(kind, name, position)}`, "aria-label": token === undefined ? undefined : `${word(token)}: ${sum(state, name, position) || describe(kind, name, position)}`},
            token === undefined ? (ghost ? word(sampled) : "") : word(token)));
        }
        const block = r.table[index];
        const gone = block !== undefined && (state.ref[block] === 0 || given(name, block));
        blocks.push(div("logical", div("tokens", tokens), block === undefined ? span("cell none", String(index), " → –") :
          make("span", {class: "cell" + (state.ref[block] > 1 ? " shared" : "") + (touched.blocks.has(block) ? " hot" : "") + (gone ? " gone" : ""), "data-key": `c:${name}:${index}`, "data-block": block, "data-request": name, tabindex: -1,
            "aria-label": `${name}'s table, entry ${index}: block ${block}`}, `${index} → ${block}`)));
      }
      const where = state.waiting.includes(name) ? (r.status === "swapped" ? "swapped" : "waiting") : state.running.includes(name) ? "" : "between";
      rows.push(div("request" + (r.table.length ? "" : " out"), div("who", badge(name, touched.requests.has(name) ? "hot" : ""), span("state", where)), div("logicals", blocks)));
    }
    const lines = ended.map(([name, r]) => div("request ended", div("who", badge(name)), div("text", span("state", "ended: "), r.tokens.slice(r.prompt).map((t) => run.words[t] ?? "?").join("").trim() || "–")));
    const body = requests.body, top = body.scrollTop;
    body.replaceChildren(...rows, ...lines, ...(rows.length + lines.length ? [] : [div("nobody", "Nobody is here yet.")]));
    body.scrollTop = top;
    const box = body.getBoundingClientRect(), moved = [...body.querySelectorAll(".badge.hot, .cell.hot")].map((element) => element.closest(".request").getBoundingClientRect());
    if (moved.length && !moved.some((row) => row.top >= box.top - 1 && row.bottom <= box.bottom + 1)) body.scrollTop += moved[0].top - box.top;
  }
  const describe = (kind, name, position) => ({cached: "from the prefix cache", computed: "its K and V are in the cache", fresh: "computed in this step", pending: "not computed yet"}[kind.split(" ")[0]] || "") + `: token ${position} of ${name}`;
  function sum(state, name, position) {
    const table = state.requests[name] && state.requests[name].table, index = Math.floor(position / size());
    if (!table || table[index] === undefined) return "";
    const s = size(), block = table[index];
    return `table[${position} // ${s}] · ${s} + ${position} % ${s} = table[${index}] · ${s} + ${position % s} = ${block} · ${s} + ${position % s} = ${block * s + position % s}`;
  }

  const bars = (digits) => {
    if (!digits) return "";
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    svg.setAttribute("viewBox", `0 0 ${3 * digits.length} 10`);
    svg.setAttribute("class", "barcode");
    svg.setAttribute("preserveAspectRatio", "none");
    path.setAttribute("d", [...digits].map((digit, i) => `M${3 * i} 10V${9 - digit}h2V10z`).join(""));
    svg.append(path);
    return svg;
  };
  const ordinal = (n) => n + (n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] || "th");
  function drawMemory(state) {
    const b = beat(), total = state.ref.length, perRow = Math.min(size(), 8);
    const shown = total * size() <= 128 ? [...state.ref.keys()] : [...state.ref.keys()].filter((block) => run.used.has(block) || state.queue[0] === block);
    const place = new Map(state.queue.map((block, i) => [block, i])), current = currentSlots(state);
    const cards = shown.map((block) => {
      const n = state.ref[block], holders = holdersOf(state, block), name = state.names[block];
      const kind = n === 0 ? "isfree" : n === 1 ? "isused" : "isshared";
      const turn = place.get(block) === 0 ? "next" : ordinal(place.get(block) + 1), queueText = "free · " + turn;
      const classes = ["block", kind, touched.blocks.has(block) && "touch", touched.sources.has(block) && "source", place.get(block) === 0 && "next", [...touched.wrong].some((slot) => Math.floor(slot / size()) === block) && "bad"].filter(Boolean);
      const slots = Array.from({length: size()}, (_, offset) => {
        const slot = block * size() + offset, cell = state.slots[slot];
        const wrong = touched.wrong.has(slot), written = touched.written.has(slot), read = touched.read.has(slot);
        const mark = wrong ? "✗" : written ? "▼" : read ? "●" : "";
        const text = cell ? word(cell[0]) : "", stale = cell && n > 0 && !written && !read && !current.has(slot);
        return make("div", {class: "slot" + (cell ? " full" : "") + (stale ? " stale" : "") + (wrong ? " wrong" : written ? " written" : read ? " reading" : ""), "data-key": "s:" + slot, tabindex: -1,
          "aria-label": `slot ${slot}: ${text || "empty"}${written ? ", written now" : wrong ? ", read wrongly" : read ? ", read now" : ""}`},
          span("w", span("", text)), bars(cell && cell[1]), span("i", mark ? make("em", {}, mark) : null, String(slot)));
      });
      return make("div", {class: classes.join(" "), "data-key": "b:" + block, tabindex: -1, "data-memory": block,
        "aria-label": `block ${block}, ${n ? "held by " + listed(holders.length ? holders : [n + " references"]) : queueText}${name ? ", cached as " + name : ""}`},
        div("head", make("b", {}, "block " + block), name ? make("span", {class: "name", title: "the prefix cache finds it by this hash"}, "◆ " + name) : null,
          span("held", n ? [...holders.map((h) => badge(h)), ...Array.from({length: Math.max(0, n - holders.length)}, () => badge("·", "nobody"))] : [span("fr", "free · "), turn])),
        make("div", {class: "slots", style: `grid-template-columns:repeat(${perRow},minmax(0,1fr))`}, slots));
    });
    const parts = [make("div", {class: "pool", style: `--block:${perRow * 40 + 4}px`}, cards)];
    stage.classList.toggle("large", shown.length > 16);
    if (shown.length < total) parts.push(div("more", `and ${total - shown.length} blocks that this run never touches`));
    parts.push(drawQueue(state));
    if (state.host.length) parts.push(drawHost(state, b));
    memory.body.replaceChildren(...parts);
    const first = [...touched.written.keys()][0];
    sumLine.textContent = first === undefined ? "Point at a token, a cell, a block or a slot: its counterparts light up." : sumOfSlot(state, first);
    fitWords();
  }
  // A word that is wider than its slot is set narrower, and only then cut.
  const ruler = document.createElement("canvas").getContext("2d"), NARROWEST = 0.58;
  function fitWords() {
    const words = [...memory.body.querySelectorAll(".slot.full .w")], room = words.length ? words[0].clientWidth : 0;
    if (!room) return;
    const style = getComputedStyle(words[0]);
    words.forEach((element) => {
      const text = element.firstChild, bold = element.parentNode.matches(".written, .wrong");
      ruler.font = `${bold ? 700 : 400} ${style.fontSize} ${style.fontFamily}`;
      const share = room / Math.max(1, ruler.measureText(text.textContent).width);
      if (share >= 1) return;
      text.style.transform = `scaleX(${Math.max(NARROWEST, share)})`;
      text.style.width = room / Math.max(NARROWEST, share) + "px";
      if (share < NARROWEST) element.title = text.textContent;
    });
  }
  function currentSlots(state) {  // rows that a table leads to; the others are left over
    const slots = new Set();
    Object.entries(state.requests).forEach(([name, r]) => {
      const base = beat().base[name], end = base === undefined ? r.computed : beat().wrote ? base + (state.scheduled[name] || 0) : base;
      r.table.forEach((block, index) => { for (let o = 0; o < size() && index * size() + o < end; o++) slots.add(block * size() + o); });
    });
    return slots;
  }
  function drawQueue(state) {
    const gone = before.queue.filter((block) => !state.queue.includes(block)), visible = state.queue.slice(0, 24);
    return div("queue", make("b", {}, "free queue"), gone.map((block) => span("chip gone", "− " + block)),
      visible.flatMap((block, i) => [make("span", {class: "chip" + (i === 0 ? " next" : "") + (before.queue.includes(block) ? "" : " joined"), "data-key": "q:" + block, tabindex: -1,
        "aria-label": `${ordinal(i + 1)} in the free queue: block ${block}${state.names[block] ? ", the prefix cache can still find it" : ""}`},
        i === 0 ? make("small", {}, "next") : null, String(block), state.names[block] ? make("em", {}, "◆ " + state.names[block]) : null), i + 1 < visible.length ? span("arrow", "→") : null]),
      state.queue.length > 24 ? span("more", `and ${state.queue.length - 24} more`) : null, state.queue.length ? null : span("chip empty", "empty: the next one who needs a block must take it from somebody"));
  }
  function drawHost(state, b) {
    const blocks = state.host.length / size(), owner = (block) => Object.keys(state.requests).find((name) => state.requests[name].host.includes(block));
    const moving = new Set(b.event === "MOVE" ? [...b.fields.swap_out.map(([, to]) => to), ...b.fields.swap_in.map(([from]) => from)] : []);
    return div("host", make("b", {}, "host memory"), Array.from({length: blocks}, (_, block) => {
      const words = state.host.slice(block * size(), (block + 1) * size()), held = owner(block);
      return make("div", {class: "hostblock" + (held ? " held" : "") + (moving.has(block) ? " touch" : ""), "data-host": block}, make("small", {}, "host " + block), held ? badge(held) : null,
        span("w", words.map((token) => token === null ? "" : word(token)).join(" ").trim() || "–"));
    }));
  }

  function drawCode(b) {
    const frames = b.at.map((number) => run.frames[number]), last = frames.length - 1;
    const chosen = shownFrame === null ? last : Math.min(shownFrame, last);
    const held = code.body.contains(document.activeElement) && document.activeElement.matches("pre");
    code.body.replaceChildren();
    code.aside.textContent = "";
    if (last < 0) return;
    const [file, , line, source] = frames[chosen], lines = data.sources[source] || [];
    code.aside.textContent = file.startsWith("fault: ") ? "the planted fault" : `paged/${file}:${line}`;
    code.body.append(div("stack", frames.slice(-5).map((frame, i) => {
      const number = frames.length - Math.min(5, frames.length) + i;
      return [i ? " › " : null, make("button", {type: "button", tabindex: -1, "aria-pressed": number === chosen, onclick: () => { shownFrame = number; drawCode(b); }}, frame[1])];
    }).flat()));
    const start = Number(source.slice(source.lastIndexOf(":") + 1)), running = line - start, most = 13;
    const indent = Math.min(...lines.filter((text) => text.trim()).map((text) => text.search(/\S/)));
    const from = Math.max(0, Math.min(running - 6, lines.length - most)), listing = make("pre", {tabindex: -1, "aria-label": "source"});
    let real = 0, depth = 0;  // a continued line is indented by four more, however far right it stands
    lines.slice(from, from + most).forEach((text, i) => {
      if (text.trim()) {
        const now = text.search(/\S/) - indent;
        depth = i && now === real ? depth : i ? Math.min(now, depth + 4) : Math.min(now, 12);
        real = now;
      }
      listing.append(make("div", {class: from + i === running ? "runs" : "", style: `--depth:${depth}`}, span("n", String(start + from + i)), make("code", {}, text.trim() || " ")));
    });
    code.body.append(listing);
    const marked = listing.querySelector(".runs");
    const height = marked ? parseFloat(getComputedStyle(listing).lineHeight) : 0, room = Math.floor(listing.clientHeight / height);
    if (!(room > 0)) return;
    listing.style.maxHeight = room * height + "px";  // whole lines
    listing.tabIndex = listing.scrollHeight > listing.clientHeight ? 0 : -1;
    if (held) listing.focus({preventScroll: true});
    listing.scrollTop = Math.max(0, Math.round((marked.offsetTop - listing.offsetTop) / height) - Math.floor(room / 2)) * height;
  }
  const brief = (fields) => fields.before !== undefined ? `${fields.request} ${fields.before} → ${fields.after}` : Object.entries(fields).filter(([key, value]) => typeof value !== "object" && !["error", "seconds"].includes(key)).map(([key, value]) => `${key}=${key === "prefix" && value.length === 16 ? value.slice(-4) : value}`).join(" ")
    + (Array.isArray(fields.blocks) ? ` blocks=${fields.blocks}` : "") + (fields.pairs ? ` pairs=${fields.pairs.map((pair) => pair.join("→"))}` : "") + (fields.slots ? ` slots=${fields.slots.length > 6 ? fields.slots.length : fields.slots}` : "")
    + (fields.requests ? ` of=${fields.requests}` : "");
  function drawLog() {
    const most = 5, first = Math.max(0, Math.min(at - 2, run.beats.length - most));
    log.body.replaceChildren(make("ol", {}, run.beats.slice(first, first + most).map((b, i) => make("li", {class: (first + i === at ? "now" : first + i > at ? "later" : "") + (b.fields.wrong || b.event === "FAILED" ? " wrong" : ""), "data-key": "l:" + (first + i), tabindex: -1, title: `${b.event} ${brief(b.fields)}`, onclick: () => go(first + i)},
      span("n", String(b.step)), span("e", make("i", {class: "mark " + b.phase}), b.event.replace(/^(KV_BLOCK|STATE)_/, "")), span("f", brief(b.fields))))));
  }
  function drawMap() {
    const last = run.beats[run.beats.length - 1].step, origin = Math.max(1, run.beats[0].step), names = [], did = {};
    run.beats.forEach((b) => Object.keys(b.state.requests).forEach((name) => { if (!names.includes(name)) names.push(name); }));
    run.beats.forEach((b) => {
      if (b.event.startsWith("SCHEDULE_")) b.fields.requests.forEach((name, i) => { did[name + " " + b.step] = [b.event === "SCHEDULE_PREFILL" ? "prefill" : "decode", b.fields.tokens[i]]; });
      if (b.event === "STATE_TRANSITION" && b.fields.before === "running" && b.fields.after !== "finished") did[b.fields.request + " " + b.step] = ["preempted", "✕"];
    });
    const life = {};
    run.beats.forEach((b) => Object.entries(b.state.requests).forEach(([name, r]) => { life[name + " " + b.step] = r.status; }));
    const here = beat().step, head = [make("th")], few = last - origin < 18;
    for (let step = origin; step <= last; step++) head.push(make("th", {scope: "col", class: step === here ? "now" : ""}, few || step % 5 === 0 || step === here ? String(step) : ""));
    const rows = names.map((name) => make("tr", {}, make("th", {scope: "row"}, name), Array.from({length: Math.max(0, last - origin + 1)}, (_, i) => {
      const step = origin + i, [kind, text] = did[name + " " + step] || [{waiting: "waits", swapped: "waits", running: "idle"}[life[name + " " + step]] || "absent", ""];
      return make("td", {class: kind + (step === here ? " now" : "") + (step > here ? " later" : ""), title: kind === "absent" ? undefined : `${name} in step ${step}: ${{prefill: `${text} prompt tokens`, decode: "decodes", preempted: "gives way", waits: "waits", idle: "holds its blocks"}[kind]}`,
        onclick: () => go(run.beats.findIndex((b) => b.step === step))}, kind === "decode" ? "•" : kind === "waits" ? "–" : String(text));
    })));
    map.body.replaceChildren(make("table", {}, make("caption", {class: "hidden"}, "Tokens that each request computes in each step"), make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
  }

  // ── for a screen reader: what the panels show, as tables
  function drawTables(state) {
    const table = (caption, head, rows) => make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, head.map((t) => make("th", {scope: "col"}, t)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((text, i) => make(i ? "td" : "th", i ? {} : {scope: "row"}, String(text)))))));
    const shown = [...state.ref.keys()].filter((block) => state.ref.length * size() <= 128 || run.used.has(block));
    tables.replaceChildren(
      table("Requests: status, tokens, block table", ["request", "status", "tokens", "computed", "block table"], Object.entries(state.requests).map(([name, r]) =>
        [name, r.status, r.tokens.map(word).join(" "), r.computed, r.table.join(", ") || "none"])),
      table("K/V memory: blocks", ["block", "references", "held by", "cached as", "holds"], shown.map((block) =>
        [block, state.ref[block], holdersOf(state, block).join(", ") || (state.ref[block] ? "" : `free, number ${state.queue.indexOf(block) + 1} in the queue`), state.names[block] || "", state.slots.slice(block * size(), (block + 1) * size()).map((cell) => cell ? word(cell[0]) : "empty").join(" ")])),
      table("Scheduler", ["queue", "requests"], [["waiting", state.waiting.join(", ") || "none"], ["running", state.running.join(", ") || "none"], ["free queue, next first", state.queue.join(", ") || "empty"]]));
  }

  // ── what belongs together
  function places(state, slot) {
    const block = Math.floor(slot / size()), found = [];
    Object.entries(state.requests).forEach(([name, r]) => r.table.forEach((held, index) => { if (held === block) found.push([name, index, index * size() + slot % size()]); }));
    return found;
  }
  function counterparts(key) {
    const state = beat().state, [kind, a, b] = key.split(":"), keys = new Set([key]);
    const addCell = (name, index, offset) => {
      const r = state.requests[name], block = r && r.table[index];
      keys.add(`c:${name}:${index}`).add(`w:${name}:${index}`);
      if (block !== undefined) keys.add("b:" + block).add("q:" + block);
      for (let o = 0; o < size(); o++) if (offset === undefined || o === offset) {
        keys.add(`t:${name}:${index * size() + o}`);
        if (block !== undefined) keys.add("s:" + (block * size() + o));
      }
    };
    if (kind === "t") { addCell(a, Math.floor(b / size()), b % size()); }
    if (kind === "c") addCell(a, Number(b));
    if (kind === "s") { const places_ = places(state, Number(a)); places_.forEach(([name, index]) => addCell(name, index, a % size())); keys.add("b:" + Math.floor(a / size())); }
    if (kind === "b" || kind === "q") {
      keys.add("b:" + a).add("q:" + a);
      Object.entries(state.requests).forEach(([name, r]) => r.table.forEach((block, index) => { if (block === Number(a)) addCell(name, index); }));
    }
    if (kind === "r") { keys.add("r:" + a); (state.requests[a] ? state.requests[a].table : []).forEach((_, index) => addCell(a, index)); }
    if (kind === "l") {
      const t = touchedBy(run.beats[a]);
      [...t.blocks, ...t.sources].forEach((block) => keys.add("b:" + block).add("q:" + block));
      [...t.written.keys(), ...t.read].forEach((slot) => keys.add("s:" + slot));
      t.requests.forEach((name) => keys.add("r:" + name));
    }
    return keys;
  }
  function sumOfSlot(state, slot) {
    const found = places(state, slot);
    if (!found.length) return `slot ${slot} = block ${Math.floor(slot / size())} · ${size()} + ${slot % size()}; no table names this block`;
    const said = new Map();  // those who share a block mostly have it at the same place
    found.forEach(([name, , position]) => { const text = `token ${position}:  ${sum(state, name, position)}`; said.set(text, [...(said.get(text) || []), name]); });
    return [...said].map(([text, names]) => `${listed(names)}, ${text}`).slice(0, 2).join("     ");
  }
  function link(key) {
    root.classList.toggle("linking", key !== null);
    root.querySelectorAll(".lit").forEach((element) => element.classList.remove("lit"));
    if (key === null) return;
    const keys = counterparts(key), [kind, a, b] = key.split(":"), state = beat().state;
    root.querySelectorAll("[data-key]").forEach((element) => element.classList.toggle("lit", keys.has(element.dataset.key)));
    if (kind === "t") sumLine.textContent = sum(state, a, Number(b)) ? `${a}, token ${b}:  ${sum(state, a, Number(b))}` : `${a}'s token ${b} has no block yet`;
    if (kind === "s") sumLine.textContent = sumOfSlot(state, Number(a));
    if (kind === "c") sumLine.textContent = `${a}'s tokens ${b * size()} to ${(Number(b) + 1) * size() - 1} lie in block ${state.requests[a].table[b]}: slots ${state.requests[a].table[b] * size()} to ${state.requests[a].table[b] * size() + size() - 1}`;
    if (kind === "b" || kind === "q") {
      const holders = holdersOf(state, Number(a)), name = state.names[a];
      sumLine.textContent = `block ${a}: ` + (holders.length ? `held by ${listed(holders)}` : `free, ${ordinal(state.queue.indexOf(Number(a)) + 1)} to be handed out`) + (name ? `; the prefix cache finds it as ${name}` : state.ref[a] ? "" : "; nobody can find what it holds");
    }
  }
  let over = null;
  root.addEventListener("pointerover", (event) => {
    const element = event.target.closest("[data-key]"), key = element && root.contains(element) ? element.dataset.key : null;
    if (key !== over) { over = key; link(key); }
  });
  root.addEventListener("pointerleave", () => { over = null; link(null); });
  root.addEventListener("focusin", (event) => { if (event.target.dataset && event.target.dataset.key && event.target.matches(":focus-visible")) link(event.target.dataset.key); });
  root.addEventListener("focusout", (event) => { if (event.target.dataset && event.target.dataset.key) link(null); });

  // ── wires run behind everything that carries text
  function drawWires() {
    wires.replaceChildren();
    if (root.dataset.layout === "phone") return;
    const origin = stage.getBoundingClientRect(), pool = memory.body.querySelector(".pool");
    const line = (name, d, key, head) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", d);
      path.setAttribute("class", name);
      if (key) path.dataset.key = key;
      if (head) path.setAttribute("marker-end", "url(#" + root.id + "-head)");
      wires.append(path);
    };
    const marker = document.createElementNS("http://www.w3.org/2000/svg", "defs");
    marker.innerHTML = `<marker id="${root.id}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" class="tip"/></marker>`;
    wires.append(marker);
    const cards = new Map([...pool.children].map((card) => [Number(card.dataset.memory), card.getBoundingClientRect()]));
    const ends = new Map(), cells = [...requests.body.querySelectorAll(".cell[data-block]")];
    cells.forEach((cell) => { const block = Number(cell.dataset.block); ends.set(block, (ends.get(block) || 0) + 1); });
    const used = new Map(), box = requests.body.getBoundingClientRect();
    // Down between the words, beside those of other requests, and across only below them.
    const rows = [...requests.body.children], under = Math.min(box.bottom, rows[rows.length - 1].getBoundingClientRect().bottom) - origin.top;
    const starts = [];
    cells.forEach((cell) => {
      const block = Number(cell.dataset.block), card = cards.get(block), from = cell.getBoundingClientRect();
      if (!card || from.top > box.bottom || from.bottom < box.top) return;
      const n = used.get(block) || 0;
      used.set(block, n + 1);
      const middle = from.left + from.width / 2 - origin.left, y1 = Math.min(from.bottom, box.bottom) - origin.top, y0 = Math.max(y1, under);
      const aside = [0, -6, 6, -12, 12, -18, 18].find((shift) => starts.every((x) => Math.abs(x - middle - shift) >= 6)) || 0, x1 = middle + aside;
      starts.push(x1);
      const x2 = card.left + card.width * (n + 1) / (ends.get(block) + 1) - origin.left, y2 = card.top - origin.top, bend = Math.max(14, Math.min(60, (y2 - y0) / 2));
      const gone = cell.classList.contains("gone"), name = cell.dataset.request;
      const writes = [...touched.written].some(([slot, request]) => request === name && Math.floor(slot / size()) === block);
      const reads = beat().event === "READ" && touched.requests.has(name) && touched.read.has(block * size());
      line("wire" + (cell.classList.contains("shared") ? " shared" : "") + (touched.blocks.has(block) || writes ? " hot" : reads ? " reads" : "") + (gone ? " gone" : ""),
        `M${x1} ${y1}V${y0}C${x1} ${y0 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`, `w:${cell.dataset.key.slice(2)}`);
    });
    const gap = 9;
    touched.copies.forEach(([from, to]) => {
      const a = cards.get(from), c = cards.get(to);
      if (!a || !c || from === to) return;
      const x1 = a.left + a.width * 0.6 - origin.left, y1 = a.bottom - origin.top, x2 = c.left + c.width * 0.4 - origin.left;
      const same = Math.abs(a.top - c.top) < 4, y = y1 + gap, y2 = (same ? c.bottom : c.top) - origin.top;
      line("copy", same ? `M${x1} ${y1}V${y}H${x2}V${y2 + 1}` : `M${x1} ${y1}V${y}H${x2}V${y2 - 1}`, null, true);
    });
    if (beat().event === "MOVE") {
      const hosts = new Map([...memory.body.querySelectorAll("[data-host]")].map((element) => [Number(element.dataset.host), element.getBoundingClientRect()]));
      const swap = (c, h, out) => {
        if (!c || !h) return;
        const x1 = c.left + c.width / 2 - origin.left, y1 = c.bottom - origin.top, x2 = h.left + h.width / 2 - origin.left, y2 = h.top - origin.top;
        line("copy", out ? `M${x1} ${y1}C${x1} ${y1 + 50} ${x2} ${y2 - 50} ${x2} ${y2 - 1}` : `M${x2} ${y2}C${x2} ${y2 - 50} ${x1} ${y1 + 50} ${x1} ${y1 + 1}`, null, true);
      };
      beat().fields.swap_out.forEach(([block, host]) => swap(cards.get(block), hosts.get(host), true));
      beat().fields.swap_in.forEach(([host, block]) => swap(cards.get(block), hosts.get(host), false));
    }
  }

  // ── phone: one panel at a time, with a dot where something changed
  function layout() {
    const width = root.clientWidth;
    root.dataset.layout = width >= 940 ? "wide" : width >= 620 ? "middle" : "phone";
    const all = [memory, requests, scheduler, code, log, map];
    all.forEach((p) => p.element.classList.toggle("off", root.dataset.layout === "phone" && !views[view].includes(p)));
    [...viewTabs.children].forEach((tab) => tab.setAttribute("aria-pressed", tab.firstChild.textContent === view));
    drawRoll();
    show();
  }
  function markViews() {
    const b = beat(), changed = {Memory: touched.blocks.size + touched.written.size + touched.read.size + touched.copies.length > 0, Requests: b.event !== "SCHEDULE_PREFILL" && touched.requests.size > 0,
      Scheduler: b.event.startsWith("SCHEDULE") || b.event === "STATE_TRANSITION" || b.event === "ADMISSION_REFUSED", Code: false};
    [...viewTabs.children].forEach((tab) => tab.classList.toggle("changed", changed[tab.firstChild.textContent] && tab.firstChild.textContent !== view));
  }

  // ── keys and addresses
  function rove(direction) {
    const active = document.activeElement, group = (active && active.closest && active.closest(".panel")) || memory.element;
    const items = [...group.querySelectorAll("[data-key]")].filter((item) => item.tabIndex !== undefined && item.getClientRects().length);
    if (!items.length) return;
    const index = items.indexOf(active);
    items[(index + direction + items.length) % items.length].focus();
  }
  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target === select) return;
    const onButton = event.target.closest && event.target.closest("button, summary, a");
    if (asked !== null && asked.chosen === null && /^[1-9]$/.test(event.key)) {
      const option = ask.querySelectorAll(".option")[event.key - 1];
      if (option) option.click();
    } else if (event.key === "ArrowRight") event.shiftKey ? goStep(1) : go(asked !== null ? asked.number : at + 1);
    else if (event.key === "ArrowLeft") event.shiftKey ? goStep(-1) : go(asked !== null ? at : at - 1);
    else if (event.key === "Home") go(0);
    else if (event.key === "End") go(run.beats.length - 1);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") rove(event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === " " && !onButton) toggle();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
  root.addEventListener("keydown", onKey);
  if (data.page) document.addEventListener("keydown", (event) => { if (event.target === document.body) onKey(event); });
  function fromAddress() {
    const found = /^#theatre\/([^/]+)(?:\/(\d+))?$/.exec(location.hash), other = found && runs.find((r) => r.address === decodeURIComponent(found[1]));
    if (!other) return false;
    open(other, Number(found[2] || 1) - 1);
    root.scrollIntoView({block: "start", behavior: "instant"});
    return true;
  }
  if (data.addresses) addEventListener("hashchange", fromAddress);
  addEventListener("beforeprint", () => root.querySelectorAll(".static .run details").forEach((list) => { list.open = true; }));
  let width = 0;
  root.dataset.layout = root.clientWidth >= 940 ? "wide" : root.clientWidth >= 620 ? "middle" : "phone";
  if (!(data.addresses && fromAddress())) {
    const [address, number] = (data.start || "").split("/"), first = runs.find((r) => r.address === address) || run;
    open(first, number ? number - 1 : failing(first));
  }
  new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; layout(); } else drawWires(); }).observe(stage);
  requests.body.addEventListener("scroll", drawWires);
  layout();
}
