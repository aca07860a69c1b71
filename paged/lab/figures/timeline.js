// Requests over steps, under sliders. data: controls, steps (of the longest run), runs[row] {requests [[kind, steps] ...], tokens
// [a step's], used [a step's blocks], budget, blocks, said}. Kinds: free waits, new computes its prompt, used decodes, external
// is put back.
function figure(root, data) {
  const NS = "http://www.w3.org/2000/svg", ROW = 12, BAND = 46;
  const made = (tag, attributes) => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const count = data.runs[0].requests.length, height = count * ROW;
  const drawing = (tall) => made("svg", {viewBox: `0 0 ${data.steps} ${tall}`, preserveAspectRatio: "none", style: `height: ${tall}px`, role: "img"});
  const lanes = drawing(height), tokens = drawing(BAND), blocks = drawing(BAND);
  const say = h("p", {class: "sum", "aria-live": "polite"});
  const controls = sliders(data.controls, draw);
  const tokensAt = h("span", {class: "muted"}), blocksAt = h("span", {class: "muted"});
  root.replaceChildren(heading(root, data), controls.element, say,
    h("div", {class: "part"}, "Requests, a row each, over steps", h("span", {class: "legend"}, swatch("new", "computes its prompt"), swatch("used", "decodes"),
      swatch("free", "waits"), swatch("external", "is put back"))), h("div", {class: "lanes"}, lanes),
    h("div", {class: "part"}, "Tokens of the step", tokensAt), h("div", {class: "lanes"}, tokens),
    h("div", {class: "part"}, "Blocks in use", blocksAt), h("div", {class: "lanes"}, blocks));

  function band(svg, values, most, color) {
    const path = values.map((value, i) => `L${i} ${BAND - BAND * value / most} L${i + 1} ${BAND - BAND * value / most}`).join(" ");
    svg.replaceChildren(made("path", {d: `M0 ${BAND} ${path} L${values.length} ${BAND} Z`, style: `fill: var(--${color})`}));
  }
  function draw(places, row) {
    const run = data.runs[row];
    const shapes = [];
    run.requests.forEach((pieces, request) => {
      let at = 0;
      for (const [kind, steps] of pieces) {
        const tall = kind === "free" ? 3 : kind === "external" ? ROW - 1 : kind === "new" ? ROW - 2 : 5;
        if (kind) shapes.push(made("rect", {x: at, width: steps, y: request * ROW + (ROW - tall) / 2, height: tall, style: `fill: var(--${kind})`}));
        at += steps;
      }
    });
    lanes.replaceChildren(...shapes);
    band(tokens, run.tokens, run.budget, "new");
    band(blocks, run.used, run.blocks, "used");
    tokensAt.textContent = "the top is the budget, " + run.budget;
    blocksAt.textContent = "the top is the pool, " + run.blocks;
    say.textContent = run.said;
    lanes.setAttribute("aria-label", run.said);
    tokens.setAttribute("aria-label", "Tokens of each step, at most " + Math.max(...run.tokens));
    blocks.setAttribute("aria-label", "Blocks in use at each step, at most " + Math.max(...run.used));
  }
  controls.move(0, controls.places[0]);
}
