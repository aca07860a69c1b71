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

const number = (value) => Math.round(value).toLocaleString("en-US");
const swatch = (color, label) => h("span", {class: "key"}, h("i", {class: "swatch " + color}), label);
const heading = (root, data) => h("p", {class: "title"},
  h("a", {href: "#" + root.id}, "Figure " + data.number), ". " + data.title);
