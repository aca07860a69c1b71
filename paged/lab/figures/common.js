// h("div", {class: "x"}, child, ...) makes an element; attributes that start with "on" are listeners.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const digits = (value) => Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
const number = (value) => value.toLocaleString("en-US", {minimumFractionDigits: digits(value), maximumFractionDigits: digits(value)});
const swatch = (color, label) => h("span", {class: "key"}, h("i", {class: "swatch " + color}), label);
const heading = (root, data) => h("p", {class: "title"},
  h("a", {href: "#" + root.id}, "Figure " + data.number), ". " + data.title);

// Sliders with names, over controls [{label, values}]; `changed` is called with the place of each in its values.
function sliders(controls, changed) {
  const places = controls.map((control) => control.at ?? Math.floor(control.values.length / 2));
  const outputs = controls.map(() => h("output"));
  const inputs = controls.map((control, i) => h("input", {type: "range", "aria-label": control.label, min: 0,
    max: control.values.length - 1, value: places[i], oninput: (event) => move(i, Number(event.target.value))}));
  function move(i, place) {
    places[i] = place;
    controls.forEach((control, j) => {
      const said = control.values[places[j]].toLocaleString("en-US");
      inputs[j].value = places[j];
      inputs[j].setAttribute("aria-valuetext", said);
      outputs[j].textContent = said;
    });
    // Of all combinations, the last control changing fastest.
    const row = controls.reduce((before, control, j) => before * control.values.length + places[j], 0);
    changed(places, row);
  }
  return {places, move, element: h("div", {class: "sliders"}, ...controls.map((control, i) => h("label", {},
    h("span", {class: "now"}, control.label, outputs[i]), inputs[i])))};
}
