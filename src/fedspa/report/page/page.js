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

all(document, ".plot").forEach((figure) => choosable(figure.parentElement));
// On paper nothing can be opened: what belongs there is.
let closed = [];
addEventListener("beforeprint", () => {
  closed = all(document, "details.printed:not([open])");
  closed.forEach((part) => { part.open = true; });
});
addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));
