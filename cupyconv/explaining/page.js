"use strict";
// Output p and tap r of an axis read input p * stride - before + r * dilation; everything that is
// shown follows from that line.  A view draws two axes as grids, or one as strips; a layer of three
// axes has three views, because a window is the product of its extents along the axes.
const layer = JSON.parse(document.getElementById("layer").textContent);
const told = document.getElementById("told");
const heat = document.getElementById("heat");
// Cells along an axis; longer ones show both ends.  Three grids fit beside each other on a desktop,
// and a finger finds a cell on a phone.
const NARROW = innerWidth < 600;
const ROOM = NARROW ? 11 : layer.axes.length === 2 ? 13 : 22;
const NEAR = NARROW ? 6 : ROOM - 3; // at the beginning, if the window that is shown first needs them
const FAR = NARROW ? 4 : (ROOM >> 1) - 1; // at the end
const LISTED = 6; // products that are written out
const MOST_WRITTEN = 999; // a count that fits into a cell
const RESULT = { x: "dx", w: "dw", y: "y" }; // what is told of a number of each

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const mod = (a, b) => ((a % b) + b) % b;

function readAt(axis, p, r) {
  return p * axis.stride - axis.before + r * axis.dilation;
}

// Along one axis: [other, tap or output] pairs of one position, and how many there are.
const PAIRS = {
  *y(axis, p) { // inputs and taps under a window
    for (let r = 0; r < axis.filter; r++) {
      const h = readAt(axis, p, r);
      if (h >= 0 && h < axis.input) yield [h, r];
    }
  },
  *x(axis, h) { // outputs and taps that read an input
    for (let r = 0; r < axis.filter; r++) {
      const moved = h + axis.before - r * axis.dilation;
      const p = moved / axis.stride;
      if (mod(moved, axis.stride) === 0 && p >= 0 && p < axis.output) yield [p, r];
    }
  },
  *w(axis, r) { // outputs and the inputs under a tap
    const [first, last] = outputsOf(axis, r);
    for (let p = first; p <= last; p++) yield [p, readAt(axis, p, r)];
  },
};

function outputsOf(axis, r) {
  const shift = r * axis.dilation - axis.before;
  const first = Math.max(Math.ceil(-shift / axis.stride), 0);
  const last = Math.min(Math.floor((axis.input - 1 - shift) / axis.stride), axis.output - 1);
  return [first, last];
}

function countOf(kind, axis, at) {
  if (kind === "w") {
    const [first, last] = outputsOf(axis, at);
    return Math.max(last - first + 1, 0);
  }
  let count = 0;
  for (const _ of PAIRS[kind](axis, at)) count++;
  return count;
}

function visible(start, size, needed = 0) {
  const all = Array.from({ length: size }, (_, i) => start + i);
  const head = Math.max(ROOM >> 1, Math.min(needed, NEAR));
  if (size <= Math.max(ROOM, head + 1 + FAR)) return all;
  return [...all.slice(0, head), null, ...all.slice(-FAR)];
}

const opening = (axis) => Math.min(1, axis.output - 1); // the output that is chosen at the start

const FULL = { x: "input", w: "filter", y: "output" };

class View {
  constructor(axes, parent) {
    this.axes = axes;
    this.cells = { x: new Map(), w: new Map(), y: new Map() };
    this.padding = new Map();
    this.sampled = false;
    this.element = document.createElement("div");
    this.element.className = "view";
    if (layer.axes.length === 3) {
      const title = document.createElement("h2");
      title.textContent = `Axis ${axes[0].name}`;
      this.element.append(title);
    }
    for (const kind of ["x", "w", "y"]) this.element.append(this.panel(kind));
    parent.append(this.element);
  }

  name(kind, at) {
    const letters = this.axes.map((axis) => axis.letters[{ x: 0, w: 1, y: 2 }[kind]]);
    return at ? `${kind}[${at.join(",")}]` : `${kind}[${letters.join(",")}]`;
  }

  panel(kind) {
    const panel = document.createElement("div");
    panel.className = "panel";
    const sizes = this.axes.map((axis) => axis[FULL[kind]]);
    const title = document.createElement(layer.axes.length === 3 ? "h3" : "h2");
    const what = { x: "input", w: "filter", y: "output" }[kind];
    title.textContent = `${what} ${this.name(kind)}, ${sizes.join("×")}`;
    const places = this.axes.map((axis) =>
      kind === "x"
        ? visible(
          -axis.before,
          axis.input + axis.before + axis.after,
          opening(axis) * axis.stride + (axis.filter - 1) * axis.dilation + 1
        )
        : visible(0, axis[FULL[kind]])
    );
    if (places.some((each) => each.includes(null))) this.sampled = true;
    const rows = places.length === 2 ? places[0] : [undefined];
    const columns = places[places.length - 1];
    const grid = document.createElement("div");
    grid.setAttribute("role", "grid");
    grid.setAttribute("aria-label", `${title.textContent}; arrow keys move`);
    const width = Math.max(columns.length, 4);
    grid.style.setProperty("--size", `min(var(--most), calc((100vw - 4rem) / ${width}))`);
    const ruler = this.line();
    ruler.setAttribute("aria-hidden", "true"); // cells are named by their numbers
    ruler.append(this.rule(null, kind, 0));
    for (const column of columns) ruler.append(this.rule(column, kind, this.axes.length - 1));
    grid.append(ruler);
    let most = 1;
    for (const row of rows) {
      const line = this.line();
      line.append(this.rule(row ?? null, kind, 0));
      for (const column of columns) {
        const at = row === undefined ? [column] : [row, column];
        line.append(this.cell(kind, at));
      }
      grid.append(line);
    }
    for (const cell of this.cells[kind].values()) most = Math.max(most, cell.count);
    for (const cell of this.cells[kind].values()) {
      const share = cell.count / most;
      cell.written = most <= MOST_WRITTEN && cell.count > 0 ? String(cell.count) : "";
      cell.element.textContent = cell.written;
      cell.element.style.setProperty("--warm", `${Math.round(100 * share)}%`);
      if (cell.count === 0) cell.element.classList.add("none");
      else cell.element.classList.add("warm");
    }
    const first = grid.querySelector(".c");
    if (first) first.tabIndex = 0;
    grid.addEventListener("keydown", (event) => this.move(event, grid));
    panel.append(title, grid);
    return panel;
  }

  line() {
    const line = document.createElement("div");
    line.className = "row";
    line.setAttribute("role", "row");
    return line;
  }

  // The number of a row or column, where it is one of the tensor's.
  rule(place, kind, i) {
    const rule = document.createElement("span");
    rule.className = "rule";
    rule.setAttribute("aria-hidden", "true");
    if (place !== null && place >= 0 && place < this.axes[i][FULL[kind]]) rule.textContent = place;
    return rule;
  }

  cell(kind, at) {
    if (at.includes(null)) {
      const gap = document.createElement("span");
      gap.className = "gap";
      gap.textContent = "·";
      gap.setAttribute("role", "gridcell");
      gap.setAttribute("aria-label", "left out");
      return gap;
    }
    const sizes = this.axes.map((axis) => axis[FULL[kind]]);
    if (at.some((place, i) => place < 0 || place >= sizes[i])) {
      const pad = document.createElement("span");
      pad.className = "p";
      pad.setAttribute("role", "gridcell");
      pad.setAttribute("aria-label", "padding, zero");
      this.padding.set(at.join(), pad);
      return pad;
    }
    const element = document.createElement("button");
    element.type = "button";
    element.className = "c";
    element.tabIndex = -1;
    element.setAttribute("role", "gridcell");
    const count = this.axes.reduce((n, axis, i) => n * countOf(kind, axis, at[i]), 1);
    element.setAttribute("aria-label", `${this.name(kind, at)}, ${plural(count, "product")}`);
    element.addEventListener("pointerenter", (event) => {
      if (event.pointerType === "mouse" && !kept) show(this, kind, at);
    });
    element.addEventListener("focus", () => show(this, kind, at));
    element.addEventListener("click", () => {
      kept = true;
      show(this, kind, at);
      history.replaceState(null, "", `#${kind}=${at.join()}`);
    });
    this.cells[kind].set(at.join(), { element, at, count });
    return element;
  }

  move(event, grid) {
    const lines = [...grid.children].map((line) => [...line.children]);
    const i = lines.findIndex((line) => line.includes(document.activeElement));
    if (i < 0) return;
    const j = lines[i].indexOf(document.activeElement);
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    let target;
    if (event.key === "Home") target = lines[i].find((cell) => cell.matches(".c"));
    else if (event.key === "End") target = lines[i].findLast((cell) => cell.matches(".c"));
    else if (steps[event.key]) {
      const [down, right] = steps[event.key];
      for (let a = i + down, b = j + right; lines[a] && lines[a][b]; a += down, b += right) {
        if (lines[a][b].matches(".c")) { target = lines[a][b]; break; } // over what is left out
      }
    } else return;
    event.preventDefault();
    if (!target) return;
    document.activeElement.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  }

  clear() {
    for (const cells of Object.values(this.cells))
      for (const { element } of cells.values()) {
        element.classList.remove("sel", "hit");
        element.removeAttribute("aria-selected");
      }
    for (const element of this.padding.values()) element.classList.remove("hit");
  }

  show(kind, at) {
    const along = this.axes.map((axis, i) => [...PAIRS[kind](axis, at[i])]);
    const first = { y: "x", x: "y", w: "y" }[kind];
    const second = { y: "w", x: "w", w: "x" }[kind];
    const mark = (tensor, positions) => {
      const sets = positions.map((each) => new Set(each));
      for (const cell of this.cells[tensor].values())
        if (cell.at.every((place, i) => sets[i].has(place))) cell.element.classList.add("hit");
    };
    mark(first, along.map((pairs) => pairs.map((pair) => pair[0])));
    mark(second, along.map((pairs) => pairs.map((pair) => pair[1])));
    if (kind === "y") {
      const window = this.axes.map((axis, i) =>
        new Set(Array.from({ length: axis.filter }, (_, r) => readAt(axis, at[i], r)))
      );
      for (const [key, element] of this.padding)
        if (key.split(",").every((place, i) => window[i].has(Number(place))))
          element.classList.add("hit");
    }
    const cell = this.cells[kind].get(at.join());
    if (cell) {
      cell.element.classList.add("sel");
      cell.element.setAttribute("aria-selected", "true");
    }
    told.textContent = this.sentence(kind, at, along, first, second);
  }

  sentence(kind, at, along, first, second) {
    const count = along.reduce((n, pairs) => n * pairs.length, 1);
    const whole = this.axes.length === layer.axes.length;
    // With its channels, of which every one looks the same.
    const named = (tensor, place) => {
      const channels = { x: ["c"], dx: ["c"], w: ["k", "c"], dw: ["k", "c"], y: ["k"], dy: ["k"] };
      return `${tensor}[${[...(whole ? channels[tensor] : []), ...place].join(",")}]`;
    };
    const name = named(RESULT[kind], at);
    const space = whole ? "" : `Along ${this.axes[0].name}, `;
    if (count === 0) {
      return kind === "x"
        ? `${space}${name} is zero: no window reads ${named("x", at)}, so it changes nothing in y.`
        : `${space}${name} is zero: everything it would read lies in the padding.`;
    }
    const products = [];
    for (let n = 0; n < Math.min(count, LISTED); n++) {
      let rest = n;
      const place = [];
      for (let i = along.length - 1; i >= 0; i--) {
        place.unshift(along[i][rest % along[i].length]);
        rest = Math.floor(rest / along[i].length);
      }
      const left = named(first === "y" ? "dy" : first, place.map((pair) => pair[0]));
      products.push(`${left}·${named(second, place.map((pair) => pair[1]))}`);
    }
    if (count > LISTED) products.push(`… ${(count - LISTED).toLocaleString("en")} more`);
    const list = products.join(whole ? " + " : ", ");
    const group = layer.groups > 1 ? " of the group" : "";
    const each = {
      y: ` for each of ${plural(layer.channels, "input channel")} c${group}`,
      x: ` for each of ${plural(layer.filters, "filter")} k${group}`,
      w: layer.images === 1 ? "" : ` for each of ${plural(layer.images, "image")}`,
    }[kind];
    if (!whole) {
      return `${space}${name} has ${plural(count, "pair")}: ${list}. Each goes with every pair ` +
        `along the other axes${each}.`;
    }
    let tail = "";
    const taps = this.axes.reduce((n, axis) => n * axis.filter, 1);
    if (kind === "y" && count < taps) {
      tail = ` ${plural(taps - count, "tap")} of its window ${taps - count === 1 ? "lies" : "lie"}` +
        " in the padding, which is zero.";
    }
    if (kind === "w") tail = " Channel c of x and channel k of dy alone have a part in it.";
    return `${name} is the sum of ${plural(count, "product")}${each}: ${list}.${tail}`;
  }
}

let kept = false;
const views = [];

function show(view, kind, at) {
  for (const each of views) each.clear();
  view.show(kind, at);
}

function letGo() {
  kept = false;
  for (const each of views) each.clear();
  history.replaceState(null, "", location.pathname + location.search);
  told.textContent = "Nothing is chosen.";
}

// #y=1,2 chooses an output, #x= an input, #w= a tap.
function fromAddress() {
  const match = /^#([xyw])=(\d+(?:,\d+)*)$/.exec(location.hash);
  if (!match) return false;
  const at = match[2].split(",").map(Number);
  const view = views.find((each) => each.axes.length === at.length && each.cells[match[1]].has(at.join()));
  if (!view) return false;
  kept = true;
  show(view, match[1], at);
  return true;
}

const parent = document.getElementById("views");
if (layer.axes.length === 3) {
  for (const axis of layer.axes) views.push(new View([axis], parent));
  const note = document.createElement("p");
  note.className = "note";
  note.textContent = "Three axes are drawn one by one: a window is the product of its extents " +
    "along them, and so is everything that flows back.";
  parent.prepend(note);
} else {
  views.push(new View(layer.axes, parent));
}
if (views.some((view) => view.sampled)) {
  const note = document.createElement("p");
  note.className = "note";
  note.id = "sampled";
  const sizes = layer.axes.map((axis) => axis.input).join("×");
  note.textContent = `This layer has ${sizes} inputs; both ends of its long axes are drawn, where ` +
    "the border and the pattern show. Sentences count everything.";
  parent.prepend(note);
}
heat.addEventListener("change", () => {
  for (const view of views)
    for (const cells of Object.values(view.cells))
      for (const { element, count, written } of cells.values()) {
        element.classList.toggle("warm", heat.checked && count > 0);
        element.textContent = heat.checked ? written : "";
      }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") letGo(); });
addEventListener("hashchange", fromAddress);
if (!fromAddress()) {
  const axes = views[0].axes;
  show(views[0], "y", axes.map(opening));
}
document.documentElement.dataset.ready = "true";
