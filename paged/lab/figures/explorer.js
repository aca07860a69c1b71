// Stacked bars under sliders. data: controls [{label, values}], series [{color, label}], bars [name], unit,
// amounts[row][bar][series], a row for each combination of the controls; limit, or null: {label, amounts[row]}.
function figure(root, data) {
  const segments = data.bars.map(() => data.series.map((series) => h("i", {class: series.color})));
  const lines = data.bars.map(() => h("span", {class: "limit"}));
  const bars = data.bars.map((name, b) => h("div", {class: "bar", role: "img"}, ...segments[b], ...(data.limit ? [lines[b]] : [])));
  const shares = data.bars.map(() => h("span", {class: "share"}));
  const axis = h("span");
  const rows = data.bars.map((name) => h("tr", {}, h("th", {scope: "row"}, name), ...data.series.map(() => h("td"))));
  const controls = sliders(data.controls, draw);

  root.replaceChildren(
    heading(root, data), controls.element,
    h("div", {class: "legend"}, ...data.series.map((series) => swatch(series.color, series.label)),
      ...(data.limit ? [h("span", {class: "key"}, h("i", {class: "limit-key"}), data.limit.label)] : [])),
    h("div", {class: "bars"},
      ...data.bars.flatMap((name, b) => [h("span", {class: "name"}, name), bars[b], shares[b]]),
      h("div", {class: "axis muted"}, h("span", {}, "0"), axis)),
    h("p", {class: "muted"}, "At the right: how much of the bar is “" + data.series[0].label + "”."),
    h("details", {}, h("summary", {}, "The same in numbers (" + data.unit + ")"),
      h("div", {class: "scroll"}, h("table", {},
        h("thead", {}, h("tr", {}, h("td"), ...data.series.map((series) => h("th", {scope: "col"}, series.label)))),
        h("tbody", {}, ...rows)))));

  function draw(places, row) {
    const totals = data.amounts[row].map((amounts) => amounts.reduce((sum, amount) => sum + amount, 0));
    const limit = data.limit ? data.limit.amounts[row] : 0;
    const longest = Math.max(...totals, limit) || 1;
    axis.textContent = number(longest) + " " + data.unit;
    data.amounts[row].forEach((amounts, b) => {
      amounts.forEach((amount, s) => {
        segments[b][s].style.width = 100 * amount / longest + "%";
        segments[b][s].title = data.series[s].label + ": " + number(amount) + " " + data.unit;
        rows[b].children[s + 1].textContent = number(amount);
      });
      lines[b].style.left = 100 * limit / longest + "%";
      shares[b].textContent = totals[b] ? (100 * amounts[0] / totals[b]).toFixed(1) + "%" : "–";
      bars[b].setAttribute("aria-label", data.bars[b] + ": " + data.series.map(
        (series, s) => series.label + " " + number(amounts[s])).join(", ") +
        (data.limit ? ", " + data.limit.label + " " + number(limit) : ""));
    });
  }
  controls.move(0, controls.places[0]);
}
