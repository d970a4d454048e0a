// Elements, made of text and never of HTML: what a model writes is only ever a text node.

export const byId = (id) => document.getElementById(id);

/** A new element. properties: of the object, `dataset` merged; children: nodes or strings. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const { dataset = {}, ...rest } = properties;
  Object.assign(made, rest);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

/** A new SVG element with these attributes. */
export function svg(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
