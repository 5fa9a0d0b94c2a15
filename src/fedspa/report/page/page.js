"use strict";
// Everything here adds to a page that can be read without it. Text enters the page as text only, never as markup.
const all = (root, query) => Array.from(root.querySelectorAll(query));
function make(name, text, parent, kind) {
  const node = document.createElement(name);
  if (text !== null) node.textContent = text;
  if (kind) node.className = kind;
  if (parent) parent.append(node);
  return node;
}

// Reading values: the pointer or the arrow keys choose a round; its row of the table is what is shown.
function readable(figure) {
  const canvas = figure.querySelector(".canvas"), svg = canvas.querySelector("svg");
  const places = JSON.parse(canvas.dataset.x), heights = JSON.parse(canvas.dataset.y);
  if (!places.length) return;
  const cursor = svg.querySelector(".cursor"), line = cursor.querySelector("path"), dots = all(cursor, "circle");
  const names = all(figure, ".data thead th").map((cell) => cell.textContent);
  const rows = all(figure, ".data tbody tr"), readout = figure.querySelector(".readout");
  let at = -1;
  function show(i) {
    at = Math.max(0, Math.min(places.length - 1, i));
    line.setAttribute("transform", `translate(${places[at]} 0)`);
    dots.forEach((dot, n) => {
      const y = heights[n][at];
      dot.setAttribute("visibility", y === null ? "hidden" : "inherit");
      if (y !== null) dot.setAttribute("transform", `translate(${places[at]} ${y})`);
    });
    cursor.setAttribute("visibility", "visible");
    readout.replaceChildren();
    all(rows[at], "th, td").forEach((cell, n) => {
      if (n) readout.append(" · ");
      readout.append(n === 0 || names.length > 2 ? `${names[n]} ` : "");
      make("b", cell.textContent, readout);
    });
  }
  function hide() {
    cursor.setAttribute("visibility", "hidden");
    readout.replaceChildren();
  }
  canvas.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    let best = 0;
    places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = i; });
    show(best);
  });
  canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) hide(); });
  canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible")) show(at < 0 ? places.length - 1 : at); });
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: places.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

// Agents: a click, or Enter, shows what the ledger has of one.
function choosable(section) {
  const bars = all(section, ".bar");
  if (!bars.length) return;
  const run = bars[0].dataset.run, panel = document.getElementById(`ledger-${run}`);
  const ledger = JSON.parse(document.getElementById(`ledger-data-${run}`).textContent);
  function choose(i) {
    bars.forEach((bar, n) => {
      bar.classList.toggle("chosen", n === i);
      bar.setAttribute("aria-pressed", String(n === i));
      bar.setAttribute("tabindex", n === i ? "0" : "-1");
    });
    const box = document.createElement("div");
    box.className = "found";
    make("h3", ledger[i].agent, box);
    const facts = make("dl", null, box);
    for (const [name, value] of ledger[i].facts) {
      const pair = make("div", null, facts);
      make("dt", name, pair);
      make("dd", value, pair);
    }
    const scroll = make("div", null, box, "scroll"), table = make("table", null, scroll, "entries");
    scroll.tabIndex = 0;
    const head = make("tr", null, make("thead", null, table)), body = make("tbody", null, table);
    for (const name of ["Entry", "Round", "Reserved", "Released", "Digest of the upload", "Hash of the chain"]) {
      make("th", name, head).scope = "col";
    }
    for (const entry of ledger[i].entries) {
      const row = make("tr", null, body);
      entry.forEach((text, n) => make("td", text, row, n > 3 ? "mono" : ""));
    }
    panel.replaceChildren(box);
  }
  bars.forEach((bar, i) => {
    bar.addEventListener("click", () => choose(i));
    bar.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        choose(i);
      }
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: bars.length - 1 }[event.key];
      if (to === undefined || !bars[to]) return;
      event.preventDefault();
      bar.setAttribute("tabindex", "-1");
      bars[to].setAttribute("tabindex", "0");
      bars[to].focus();
    });
  });
  all(section, "button[data-agent]").forEach((button) => button.addEventListener("click", () => {
    choose(Number(button.dataset.agent));
    panel.scrollIntoView({ block: "nearest" });
  }));
}

all(document, ".plot").forEach((figure) => {
  readable(figure);
  choosable(figure.parentElement);
});
// On paper nothing can be opened: what belongs there is.
let closed = [];
addEventListener("beforeprint", () => {
  closed = all(document, "details.printed:not([open])");
  closed.forEach((part) => { part.open = true; });
});
addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));
