// A step-through of a block pool. data: block_size, frames [{text, events, touched, ref_cnt, queue, contents,
// requests: {name: {blocks, tokens}}}]. Every element is made once; a step changes classes and texts.
function figure(root, data) {
  const size = data.block_size, last = data.frames.length - 1;
  const columns = size <= 8 ? Math.min(size, 2) : 8;
  let at = 0, timer = null, picked = null;

  const blocks = data.frames[0].ref_cnt.map((_, id) => {
    const state = h("span"), head = h("div", {class: "head"}, h("span", {}, "block " + id), state);
    const slots = Array.from({length: size}, () => h("span"));
    const grid = h("div", {class: "slots", style: "grid-template-columns: repeat(" + columns + ", minmax(0, 1fr))"}, ...slots);
    return {card: h("div", {class: "block"}, head, grid), head, state, slots};
  });
  const say = h("p", {class: "say", "aria-live": "polite"}), log = h("p", {class: "log"});
  const requests = h("div", {class: "requests"}), queue = h("div", {class: "chips"}), free = h("span", {class: "muted"});
  const previous = h("button", {type: "button", "aria-label": "Previous step", onclick: () => go(at - 1)}, "‹ Prev");
  const next = h("button", {type: "button", "aria-label": "Next step", onclick: () => go(at + 1)}, "Next ›");
  const play = h("button", {type: "button", class: "play", onclick: toggle}, "▶ Play");
  const count = h("span", {class: "muted"});
  const slider = h("input", {type: "range", min: 0, max: last, value: 0, "aria-label": "Step",
                             oninput: (event) => go(Number(event.target.value))});

  root.replaceChildren(
    heading(root, data),
    h("div", {class: "controls"}, previous, play, next, h("span", {class: "reach"}, slider, count)), say, log,
    h("div", {class: "part"}, "Requests and their block tables", h("span", {class: "muted"}, "logical → physical block")), requests,
    h("div", {class: "part"}, "The pool", h("span", {class: "legend"}, swatch("used", "one reference"),
      swatch("shared", "shared"), swatch("free", "free"), swatch("new", "this step"))),
    h("div", {class: "pool"}, ...blocks.map((block) => block.card)),
    h("div", {class: "part"}, "The free queue, next to be handed out first", free), queue);
  root.tabIndex = 0;
  root.addEventListener("keydown", (event) => {
    if (event.target === slider || event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last};
    if (event.key in steps) go(steps[event.key]);
    else if (event.key === " " && event.target === root) toggle();
    else return;
    event.preventDefault();
  });

  // The fullest frame decides the heights, so that nothing jumps from step to step.
  const most = (count) => Math.max(...data.frames.map(count));
  log.style.minHeight = 1.5 * most((frame) => frame.events.length) + "em";
  requests.style.minHeight = 40 * most((frame) => Object.keys(frame.requests).length) + "px";

  const state = (references) => references === 0 ? "free" : references === 1 ? "used" : "shared";

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶ Play";
  }
  function toggle() {
    if (timer) return stop();
    if (at === last) show(0);
    play.textContent = "❚❚ Pause";
    timer = setInterval(() => {
      show(at + 1);
      if (at === last) stop();
    }, 2200);
  }
  function go(step) {
    stop();
    if (step >= 0 && step <= last) show(step);
  }

  function pick(name) {
    picked = picked === name ? null : name;
    show(at);
    requests.children[Object.keys(data.frames[at].requests).indexOf(name)].focus();
  }

  function requestRow(name, request, frame) {
    return h("button", {type: "button", class: "request", title: "Show only these blocks", "aria-pressed": picked === name,
                        onclick: () => pick(name)},
      h("b", {}, name),
      h("span", {class: "chips"}, ...request.blocks.map((id, logical) =>
        h("span", {class: "chip " + state(frame.ref_cnt[id])}, logical + " → " + id))),
      h("span", {class: "muted"}, request.tokens + (request.tokens === 1 ? " token" : " tokens")));
  }

  function show(step) {
    at = step;
    const frame = data.frames[at];
    if (!(picked in frame.requests)) picked = null;
    say.textContent = frame.text;
    log.textContent = frame.events.join("\n");
    blocks.forEach((block, id) => {
      const references = frame.ref_cnt[id], now = state(references);
      block.card.className = "block " + now + "-block" + (frame.touched.includes(id) ? " touched" : "") +
        (picked && !frame.requests[picked].blocks.includes(id) ? " dim" : "");
      block.head.className = "head " + now;
      block.state.textContent = references === 0 ? "free" : references === 1 ? "1 ref" : references + " refs";
      block.slots.forEach((slot, i) => {
        const token = frame.contents[id][i];
        slot.className = "slot" + (token === undefined ? "" : " full") + (size > 8 ? " tiny" : "");
        slot.textContent = size > 8 || token === undefined ? "" : token;
        slot.title = token === undefined ? "empty slot" : token;
      });
    });
    const rows = Object.entries(frame.requests).map(([name, request]) => requestRow(name, request, frame));
    requests.replaceChildren(...(rows.length ? rows : [h("span", {class: "muted"}, "none")]));
    queue.replaceChildren(...frame.queue.map((id) => h("span", {class: "chip free"}, String(id))));
    free.textContent = frame.queue.length + " of " + blocks.length + " free";
    slider.value = at;
    slider.setAttribute("aria-valuetext", "step " + (at + 1) + " of " + (last + 1) + ": " + frame.text);
    count.textContent = (at + 1) + " / " + (last + 1);
    // Disabled for readers, not for the browser: a button that is really disabled loses the focus.
    previous.setAttribute("aria-disabled", at === 0);
    next.setAttribute("aria-disabled", at === last);
  }
  show(0);
}
