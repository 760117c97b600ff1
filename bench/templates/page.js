"use strict";
// Of the last table: sorting by a click on a heading, and rows that have all the words of the filter.
const table = document.querySelector("#rows table"), body = table.tBodies[0], rows = Array.from(body.rows);
const heads = Array.from(table.querySelectorAll("th"));
const numeric = (column) => rows.every(({ cells }) => !isNaN(cells[column].textContent));
const sort = (column, head) => {
  const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1, isNumber = numeric(column);
  const text = (row) => row.cells[column].textContent.trim();
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  rows.sort((one, two) => {
    const [a, b] = [text(one), text(two)];
    if (!isNumber) return sign * a.localeCompare(b);
    return a === "" || b === "" ? (a === "") - (b === "") : sign * (a - b);
  });
  body.append(...rows);
};
heads.forEach((head, column) => {
  head.tabIndex = 0;
  head.addEventListener("click", () => sort(column, head));
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(column, head); });
});
const filter = document.getElementById("filter");
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  document.getElementById("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
});
filter.closest("label").hidden = false;
