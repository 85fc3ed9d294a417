"use strict";
// Without it the report is complete; it sorts tables, and finds a run's row, line and bar by each other.
document.documentElement.classList.add("js");

const of = (run) => document.querySelectorAll(`[data-run="${run}"]`);
const pinned = new Set();
const tip = document.getElementById("tip");

function light(run) {
  document.querySelectorAll(".on").forEach((each) => each.classList.remove("on"));
  const lit = new Set(pinned);
  if (run !== undefined) lit.add(run);
  for (const each of lit) of(each).forEach((element) => element.classList.add("on"));
  document.body.classList.toggle("focus", lit.size > 0);
}

// A line is thin: what lies a few pixels beside it counts, too.
function runAt(event) {
  const hit = event.target.closest("[data-run]");
  if (hit) return hit.dataset.run;
  for (const dy of event.target.closest("svg") ? [0, -3, 3, -6, 6] : [])
    for (const dx of [0, -3, 3, -6, 6]) {
      const near = document.elementFromPoint(event.clientX + dx, event.clientY + dy)?.closest("svg [data-run]");
      if (near) return near.dataset.run;
    }
  return undefined;
}

document.addEventListener("mousemove", (event) => {
  const run = runAt(event);
  light(run);
  const label = run !== undefined && event.target.closest("figure") && document.querySelector(`tr[data-run="${run}"]`);
  tip.textContent = label ? label.dataset.label : "";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 14}px`;
});
document.addEventListener("focusin", (event) => light(event.target.closest("[data-run]")?.dataset.run));
document.addEventListener("focusout", () => light());

document.addEventListener("click", (event) => {
  const chip = event.target.closest(".chip");
  if (chip) return show([chip], chip.getAttribute("aria-pressed") === "false");
  const run = event.target.closest("thead") ? undefined : runAt(event);
  if (run === undefined) return undefined;
  if (!pinned.delete(run)) pinned.add(run);
  document.querySelectorAll(`.pin[data-pins="${run}"]`).forEach((pin) => pin.setAttribute("aria-pressed", pinned.has(run)));
  return light(run);
});

function show(chips, shown) {
  for (const chip of chips) {
    chip.setAttribute("aria-pressed", shown);
    if (chip.dataset.run) of(chip.dataset.run).forEach((each) => each.closest("svg") && each.classList.toggle("off", !shown));
  }
  if (chips.length === 1 && !chips[0].dataset.run) show([...document.querySelectorAll(".chip[data-run]")], shown);
}

for (const button of document.querySelectorAll(".sortable thead button"))
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...[...body.rows].sort((a, b) => compare(a, b, head.cellIndex, down ? -1 : 1)));
  });

// Numbers by their size, words by the alphabet behind them, and what isn't known at the end, either way.
function compare(a, b, column, sign) {
  const [x, y] = [a, b].map((row) => row.cells[column].dataset.value);
  if (x === "" || y === "") return (x === "") - (y === "");
  const [p, q] = [Number(x), Number(y)];
  if (!Number.isNaN(p) && !Number.isNaN(q)) return sign * (p - q);
  if (Number.isNaN(p) !== Number.isNaN(q)) return sign * (Number.isNaN(p) - Number.isNaN(q));
  return sign * x.localeCompare(y);
}
