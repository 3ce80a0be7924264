// Draws a report.html without a browser:
//
//     node dom.js PAGE ADDRESS [ACTIONS]
//
// prints the elements that its script makes, as markup, and then the page's address; and both
// again after each of the ACTIONS, with a form feed before. These are JSON, [element, event, value]
// each. The element is found by its aria-label or its whole text; a value is typed into it first.
// This is a document with no more than the page uses. All sizes are 0.
"use strict";
const fs = require("fs"), vm = require("vm");
const [, , pageFile, start = "", actions = "[]"] = process.argv;

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
  scrollTop = 0;
  clientWidth = 0;
  clientHeight = 0;

  constructor(tag) { this.tag = tag; }
  append(...nodes) {
    this.children.push(...nodes.map(node => typeof node === "object" ? node : new Text(node)));
  }
  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { (this.listeners[name] ||= []).push(listener); }
  getBoundingClientRect() { return {left: 0, top: 0, width: 0, height: 0}; }
  get value() { return this.typed ?? this.attributes.value ?? this.textContent; }
  set value(text) { this.typed = text; }
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

let address = start;
const browser = {
  document: {
    getElementById: id => byId[id],
    createElement: tag => new Element(tag),
    createElementNS: (_, tag) => new Element(tag),
    createTextNode: text => new Text(text),
  },
  location: {hash: address},
  history: {replaceState(state, title, there) { address = there; }},
  URLSearchParams,
  setInterval() {},
  addEventListener() {},
};
vm.runInNewContext(page.match(/<script nonce="\w+">(.*?)<\/script>/s)[1], browser);

function print() {
  console.log(`${byId.main}\naddress ${decodeURIComponent(address).replaceAll("+", " ")}`);
}

print();
for (const [name, event, value] of JSON.parse(actions)) {
  const isMeant = node => node.attributes["aria-label"] === name
    || node.textContent === name && node.listeners[event];
  const node = [...byId.tabs.all(), ...byId.main.all()].find(isMeant);
  if (!node) throw new Error(`the page has no ${name}`);
  if (value !== undefined) node.value = value;
  for (const listener of node.listeners[event] || []) listener({target: node, preventDefault() {}});
  process.stdout.write("\f");
  print();
}
