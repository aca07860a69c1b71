// Stacked bars under sliders. data: controls [{label, values}], series [{color, label}], bars [name], unit,
// amounts[row][bar][series], a row for each combination of the controls, the last control changing fastest.
function figure(root, data) {
  const position = data.controls.map((control) => Math.floor(control.values.length / 2));
  const outputs = data.controls.map(() => h("output"));
  const sliders = data.controls.map((control, i) => h("label", {},
    h("span", {class: "now"}, control.label, outputs[i]),
    h("input", {type: "range", "aria-label": control.label, min: 0, max: control.values.length - 1, value: position[i],
                oninput: (event) => { position[i] = Number(event.target.value); draw(); }})));

  const segments = data.bars.map(() => data.series.map((series) => h("i", {class: series.color})));
  const bars = data.bars.map((name, b) => h("div", {class: "bar", role: "img"}, ...segments[b]));
  const shares = data.bars.map(() => h("span", {class: "share"}));
  const axis = h("span");
  const rows = data.bars.map((name) => h("tr", {}, h("th", {scope: "row"}, name), ...data.series.map(() => h("td"))));

  root.replaceChildren(
    heading(root, data),
    h("div", {class: "sliders"}, ...sliders),
    h("div", {class: "legend"}, ...data.series.map((series) => swatch(series.color, series.label))),
    h("div", {class: "bars"},
      ...data.bars.flatMap((name, b) => [h("span", {class: "name"}, name), bars[b], shares[b]]),
      h("div", {class: "axis muted"}, h("span", {}, "0"), axis)),
    h("p", {class: "muted"}, "At the right: how much of the bar is “" + data.series[0].label + "”."),
    h("details", {}, h("summary", {}, "The same in numbers (" + data.unit + ")"),
      h("div", {class: "scroll"}, h("table", {},
        h("thead", {}, h("tr", {}, h("th"), ...data.series.map((series) => h("th", {scope: "col"}, series.label)))),
        h("tbody", {}, ...rows)))));

  function draw() {
    let row = 0;
    data.controls.forEach((control, i) => {
      row = row * control.values.length + position[i];
      const value = control.values[position[i]].toLocaleString("en-US");
      outputs[i].textContent = value;
      sliders[i].querySelector("input").setAttribute("aria-valuetext", value);
    });
    const totals = data.amounts[row].map((amounts) => amounts.reduce((sum, amount) => sum + amount, 0));
    const longest = Math.max(...totals, 1);
    axis.textContent = number(longest) + " " + data.unit;
    data.amounts[row].forEach((amounts, b) => {
      amounts.forEach((amount, s) => {
        segments[b][s].style.width = 100 * amount / longest + "%";
        segments[b][s].title = data.series[s].label + ": " + number(amount) + " " + data.unit;
        rows[b].children[s + 1].textContent = number(amount);
      });
      shares[b].textContent = totals[b] ? (100 * amounts[0] / totals[b]).toFixed(1) + "%" : "–";
      bars[b].setAttribute("aria-label", data.bars[b] + ": " + data.series.map(
        (series, s) => series.label + " " + number(amounts[s])).join(", "));
    });
  }
  draw();
}
