// From a position through the block table to a slot. data: tokens, rows, sizes [{size, table}].
function figure(root, data) {
  const tokens = Array.from({length: data.tokens}, (_, position) => h("span", {class: "cell used", onclick: () => controls.move(0, position)}, String(position)));
  const rows = Array.from({length: data.rows}, (_, slot) => h("span", {class: "cell"}, String(slot)));
  const request = h("div", {class: "strip"}), table = h("div", {class: "chips"}), cache = h("div", {class: "strip"});
  const sum = h("p", {class: "sum", "aria-live": "polite"});
  const controls = sliders([{label: "Position", values: tokens.map((_, position) => position)},
                            {label: "Tokens a block", values: data.sizes.map((choice) => choice.size), at: data.at}], draw);
  root.replaceChildren(heading(root, data), controls.element, sum,
    h("div", {class: "part"}, "The request, position by position", h("span", {class: "muted"}, "logical blocks")), request,
    h("div", {class: "part"}, "Its block table", h("span", {class: "muted"}, "logical → physical block")), table,
    h("div", {class: "part"}, "The rows of the cache", h("span", {class: "legend"}, swatch("used", "this request"), swatch("new", "this position"), swatch("free", "not its own"))), cache);

  const cut = (cells, size) => Array.from({length: Math.ceil(cells.length / size)},
    (_, block) => h("span", {class: "group", title: "block " + block}, ...cells.slice(block * size, (block + 1) * size)));
  function draw([position, choice]) {
    const {size, table: blocks} = data.sizes[choice];
    const logical = Math.floor(position / size), offset = position % size, slot = blocks[logical] * size + offset;
    request.replaceChildren(...cut(tokens, size));
    cache.replaceChildren(...cut(rows, size));
    table.replaceChildren(...blocks.map((block, i) => h("span", {class: "chip " + (i === logical ? "new" : "used")}, i + " → " + block)));
    tokens.forEach((cell, i) => { cell.className = "cell " + (i === position ? "new" : "used"); });
    rows.forEach((cell, i) => {
      const at = blocks.indexOf(Math.floor(i / size));
      const mine = at >= 0 && at * size + i % size < data.tokens;
      cell.className = "cell " + (i === slot ? "new" : mine ? "used" : "free");
    });
    sum.textContent = `slot = table[${position} // ${size}] × ${size} + ${position} % ${size} = table[${logical}] × ${size} + ${offset} = ` +
      `${blocks[logical]} × ${size} + ${offset} = ${slot}`;
  }
  controls.move(0, controls.places[0]);
}
