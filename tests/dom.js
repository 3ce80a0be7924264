// Draws a report.html without a browser:
//
//     node dom.js PAGE ADDRESS [VALUES]
//
// prints the elements that its script makes, as markup; and again, with a form feed before, after
// each of VALUES, a JSON list of texts that are typed into the filter of trajectories.
// This is a document with no more than the page uses.
"use strict";
const fs = require("fs"), vm = require("vm");
const [, , pageFile, address, values = "[]"] = process.argv;

const escape = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

class Text {
  constructor(text) { this.textContent = String(text); }
  toString() { return escape(this.textContent); }
}

class Element {
  attributes = {};
  style = {};
  children = [];
  listeners = {};
  offsetParent = {};

  constructor(tag) { this.tag = tag; }
  append(...nodes) {
    this.children.push(...nodes.map(node => typeof node === "object" ? node : new Text(node)));
  }
  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  get className() { return this.attributes.class || ""; }
  set className(value) { this.attributes.class = value; }
  get textContent() { return this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  all() {
    const elements = this.children.filter(child => child instanceof Element);
    return elements.flatMap(child => [child, ...child.all()]);
  }
  querySelectorAll(selector) {
    return this.all().filter(node => node.className.split(" ").includes(selector.slice(1)));
  }
  toString() {
    const attributes = Object.entries(this.attributes);
    const text = attributes.map(([name, value]) => ` ${name}="${escape(value)}"`).join("");
    return `<${this.tag}${text}>${this.children.join("")}</${this.tag}>`;
  }
}

const page = fs.readFileSync(pageFile, "utf8");
const byId = {};
for (const [, id] of page.matchAll(/ id="(\w+)"/g)) byId[id] = new Element("div");
byId.data.append(page.match(/<script type="application\/json" id="data">(.*?)<\/script/s)[1]);

const browser = {
  document: {
    getElementById: id => byId[id],
    createElement: tag => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
    createTextNode: text => new Text(text),
  },
  location: {hash: address},
  history: {replaceState() {}},
  URLSearchParams,
  setInterval() {},
  addEventListener() {},
};
vm.runInNewContext(page.match(/<script nonce="\w+">(.*?)<\/script>/s)[1], browser);

console.log(`${byId.main}`);
for (const value of JSON.parse(values)) {
  const filter = byId.main.all().find(node => node.attributes["aria-label"] === "filter");
  filter.value = value;
  filter.listeners.input({target: filter, preventDefault() {}});
  console.log(`\f${byId.main}`);
}
