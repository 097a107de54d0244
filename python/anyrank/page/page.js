"use strict";
/* What anyrank's pages have in common: the data, elements, numbers as text. */
const report = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (tag, props, ...children) => {
  const e = Object.assign(document.createElement(tag), props || {});
  e.append(...children.filter(c => c !== null && c !== undefined));
  return e;
};
const isDark = matchMedia("(prefers-color-scheme: dark)");

const count = n => n === undefined ? "" : n.toLocaleString("en-US");
const plural = (n, word) => count(n) + " " + word + (n === 1 ? "" : "s");
function number(x) {
  return x >= 100 || x === Math.round(x) ? String(Math.round(x)) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
}
function timeText(ns) {
  const steps = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];
  for (const [size, unit] of steps)
    if (ns >= size) return number(ns / size) + " " + unit;
  return Math.round(ns) + " ns";
}

/* A box of the row of numbers below the title. */
function addNumber(name, value, title) {
  $("numbers").append(make("div", {className: "number", title: title || ""},
                           make("span", {textContent: name}), make("strong", {textContent: value})));
}
