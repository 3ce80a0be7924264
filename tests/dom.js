// Draws a report.html without a browser: node dom.js PAGE ADDRESS [ACTIONS] prints the elements that its script makes,
// as markup, and then the page's address; and both again after each of the ACTIONS, with a form feed before. These are
// JSON, [element, event, value] each. The element is found by its aria-label or its whole text, or is said to be
// missing; a value is typed into it first. What the page keeps in the browser is kept in the file STORAGE of the
// environment, if there is one; else the browser keeps nothing.
// A document with no more than the page uses. Sizes are 0, so nothing here says how it looks.
"use strict";
const fs = require("fs"), vm = require("vm");

const escape = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

class Text {
  constructor(text) { this.text = String(text); }
  get textContent() { return this.text; }
  toString() { return escape(this.text); }
}

class Element {
  constructor(tag) {
    Object.assign(this, {tag, attributes: {}, style: {}, children: [], listeners: {}, scrollTop: 0, clientWidth: 0, clientHeight: 0, offsetParent: {}});
  }
  append(...nodes) { this.children.push(...nodes.map(node => node instanceof Element || node instanceof Text ? node : new Text(node))); }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { (this.listeners[name] ||= []).push(listener); }
  getBoundingClientRect() { return {left: 0, top: 0, width: 0, height: 0}; }
  get value() { return this.typed ?? this.attributes.value ?? this.textContent; }
  set value(text) { this.typed = text; }
  get className() { return this.attributes.class || ""; }
  set className(value) { this.attributes.class = value; }
  get textContent() { return this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.replaceChildren(text); }
  all() { return this.children.flatMap(child => child instanceof Element ? [child, ...child.all()] : []); }
  querySelectorAll(selector) { return this.all().filter(node => node.className.split(" ").includes(selector.slice(1))); }
  toString() {
    const attributes = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${escape(value)}"`).join("");
    return `<${this.tag}${attributes}>${this.children.join("")}</${this.tag}>`;
  }
}

const page = fs.readFileSync(process.argv[2], "utf8"), byId = {};
const [, data] = page.match(/<script type="application\/json" id="data">(.*?)<\/script/s);
const [, script] = page.match(/<script nonce="\w+">(.*?)<\/script>/s);
for (const [, id] of page.matchAll(/ id="(\w+)"/g)) byId[id] = new Element("div");
byId.data.append(data);
const document = {
  getElementById: id => byId[id], createElement: tag => new Element(tag), createElementNS: (_, tag) => new Element(tag),
  createTextNode: text => new Text(text), title: "",
};
let address = process.argv[3] || "";
const file = process.env.STORAGE;
const stored = () => fs.existsSync(file) ? JSON.parse(fs.readFileSync(file, "utf8")) : {};
const localStorage = {
  getItem: key => stored()[key] ?? null,
  setItem: (key, text) => fs.writeFileSync(file, JSON.stringify({...stored(), [key]: text})),
};
vm.runInNewContext(script, {
  document, location: {hash: address}, history: {replaceState(state, title, there) { address = there; }}, URLSearchParams, innerWidth: 1000, innerHeight: 1000,
  setInterval() {}, setTimeout() {}, clearTimeout() {}, addEventListener() {}, ...(file ? {localStorage} : {}),
});
const print = () => console.log(`${byId.main}\naddress ${decodeURIComponent(address).replaceAll("+", " ")}`);
print();
for (const [name, event, value] of JSON.parse(process.argv[4] || "[]")) {
  const node = [...byId.tabs.all(), ...byId.main.all()].find(node => node.attributes["aria-label"] === name || node.textContent === name && node.listeners[event]);
  if (!node) throw new Error(`the page has no ${name}`);
  if (value !== undefined) node.value = value;
  for (const listener of node.listeners[event] || []) listener({target: node, preventDefault() {}});
  process.stdout.write("\f");
  print();
}
