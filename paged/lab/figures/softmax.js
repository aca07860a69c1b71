// Online softmax, tile by tile. data: tile, scores [token], steps [{m, alpha, l, acc, out}] after 0, 1, 2 ... tiles, want.
function figure(root, data) {
  const bars = data.scores.map((_, i) => h("i"));
  const cells = data.scores.map((score, i) => h("span", {class: "weight", title: "token " + i + ", score " + score.toFixed(2)}, bars[i]));
  const say = h("p", {class: "sum", "aria-live": "polite"});
  const fixed = (value) => value === null ? "−∞" : (value.toFixed(2) * 1).toFixed(2).replace("-0.00", "0.00").replace("-", "−");
  const names = [["m", "the largest score so far"], ["α", "what corrects l and acc"], ["l", "the sum of the weights"],
    ["acc", "the weighted values"], ["acc / l", "the attention so far"], ["attention", "over all tokens"]];
  const numbers = names.map(() => h("td"));
  const controls = sliders([{label: "Tiles seen", values: data.steps.map((_, i) => i), at: 1}], draw);
  const strip = h("div", {class: "strip weights", role: "img"}, ...Array.from({length: data.steps.length - 1},
    (_, tile) => h("span", {class: "group"}, ...cells.slice(tile * data.tile, (tile + 1) * data.tile))));
  root.replaceChildren(heading(root, data), controls.element, say,
    h("div", {class: "part"}, "The weight of each token, e to the power of its score minus m",
      h("span", {class: "legend"}, swatch("new", "this tile"), swatch("used", "earlier ones"), swatch("free", "not seen yet"))), strip,
    h("div", {class: "scroll"}, h("table", {}, h("tbody", {}, ...names.map(([name, what], i) =>
      h("tr", {}, h("th", {scope: "row"}, name), numbers[i], h("td", {class: "muted"}, what)))))));

  function draw([seen]) {
    const now = data.steps[seen], before = data.steps[Math.max(seen - 1, 0)];
    data.scores.forEach((score, i) => {
      const tile = Math.floor(i / data.tile);
      cells[i].className = "weight " + (tile >= seen ? "unseen" : "");
      bars[i].className = tile === seen - 1 ? "new" : tile < seen ? "used" : "free";
      bars[i].style.height = tile < seen ? Math.max(2, 100 * Math.exp(score - now.m)) + "%" : "2%";
    });
    const vector = (values) => values === null ? "–" : values.map(fixed).join("  ");
    [fixed(now.m), fixed(now.alpha), fixed(now.l), vector(now.acc), vector(now.out), vector(data.want)].forEach(
      (text, i) => { numbers[i].textContent = text; });
    say.textContent = seen === 0 ? "Nothing is seen: m is −∞, both sums are 0."
      : seen === 1 ? `The first tile: its largest score is m = ${fixed(now.m)}. There is nothing to correct, α is 0.`
      : now.m > before.m ? `A larger score: m goes from ${fixed(before.m)} to ${fixed(now.m)}. All that was summed is too large by one factor, and α = ${fixed(now.alpha)} corrects it.`
      : `No score is larger than m = ${fixed(now.m)}: α is 1, and nothing is corrected.`;
    strip.setAttribute("aria-label", say.textContent);
  }
  controls.move(0, controls.places[0]);
}
