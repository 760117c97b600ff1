"""The report page's style sheet and its script; nothing is fetched, and without the script all is there but sorting."""

from __future__ import annotations

from . import theme

_STYLE = """
:root { color-scheme: light dark; --font: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 var(--font); }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
p, li { max-width: 46rem; }
ul { padding-left: 1.2rem; }
a { color: var(--decomposed); }
sup { line-height: 0; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; margin: 1rem 0; font-size: .9rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9em; }
.muted, figcaption, .missing { color: var(--muted); }
.missing { font-style: italic; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .75rem 0; font-size: .9rem; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: .4rem 0; }
details[open] { margin-bottom: 1.25rem; }
figure h3, summary { font-size: .95rem; font-weight: 600; margin: .25rem 0; }
summary { cursor: pointer; }
.picture { overflow-x: auto; }
.picture svg { display: block; max-width: 100%; min-width: 44rem; height: auto; }
.scroll { overflow: auto; max-width: 100%; }
.tall .scroll { max-height: 26rem; }
#rows .scroll { max-height: 36rem; border: 1px solid var(--line); border-radius: 4px; }
@media (min-width: 80rem) { #rows .scroll { width: min(96vw, 100rem); position: relative; left: 50%;
  transform: translateX(-50%); max-width: none; } }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 600; }
td.number, th.number { text-align: right; }
.wrapping td { white-space: pre-wrap; overflow-wrap: break-word; vertical-align: top; }
.wrapping td:not(.number) { min-width: 6rem; }
.wrapping td:last-child { min-width: 11rem; }
#rows thead th, .tall thead th { position: sticky; top: 0; background: var(--paper); z-index: 1; }
th button { all: unset; cursor: pointer; color: inherit; }
th button:focus-visible, summary:focus-visible { outline: 2px solid var(--decomposed); outline-offset: 2px; }
th button::after { content: " \\2195"; opacity: .35; }
th[aria-sort=ascending] button::after { content: " \\2191"; opacity: 1; }
th[aria-sort=descending] button::after { content: " \\2193"; opacity: 1; }
tr.predicted td { font-style: italic; color: var(--muted); }
label { font-size: .9rem; }
input { font: inherit; padding: .2rem .5rem; color: inherit; background: var(--paper); border: 1px solid var(--muted);
  border-radius: 4px; }
@media print { nav, label, #shown { display: none; } #rows .scroll { max-height: none; } }
"""

SCRIPT = """
"use strict";
(() => {
  const table = document.getElementById("all-rows");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.classList.contains("number") ? (cell.textContent ? parseFloat(cell.dataset.value) : NaN)
      : cell.textContent;
  };
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      rows.sort((one, two) => {
        const a = value(one, column), b = value(two, column);
        if (typeof a === "string") return sign * a.localeCompare(b);
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return sign * (a - b);
      });
      body.append(...rows);
    });
  });
  const filter = document.getElementById("filter"), shown = document.getElementById("shown");
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    shown.textContent = `${count} of ${rows.length} rows`;
  };
  filter.addEventListener("input", apply);
  filter.closest("label").hidden = false;
  apply();
})();
"""


def style() -> str:
    """CSS with every colour of `theme`, for light and for dark."""
    light, dark = theme.variables()
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)
