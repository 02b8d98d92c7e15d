"use strict";
// Draws the scene that Python described: two linked views, a grid of the pairs of channels and the
// planes of one pair.  Which positions meet, and what their numbers are, stands in the scene; here
// they are looked up, multiplied and added.
const scene = JSON.parse(document.getElementById("scene").textContent);
const $ = (id) => document.getElementById(id);
const PAD = -1;
const ZERO = -2;
const NARROW = innerWidth < 600;
const LETTER = { x: 0, dx: 0, w: 1, dw: 1, y: 2, dy: 2 };

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const own = (c) => c % scene.groupChannels; // of its group, as w and dw count it
const meet = (k, c) =>
  Math.floor(k / scene.groupFilters) === Math.floor(c / scene.groupChannels);
const isFilter = (tensor) => tensor === "w" || tensor === "dw";
const keyOf = (tensor, k, c) =>
  isFilter(tensor) ? `${k},${c}` : String(tensor.endsWith("x") ? c : k);
const planeName = (tensor, k, c) => `${tensor}[${keyOf(tensor, k, isFilter(tensor) ? own(c) : c)}]`;

function indexOf(tensor, k, c, at) {
  if (isFilter(tensor)) return [k, own(c), ...at];
  return [scene.image, tensor.endsWith("x") ? c : k, ...at];
}

const nameOf = (tensor, k, c, at) => `${tensor}[${indexOf(tensor, k, c, at).join(",")}]`;

// Numbers by position, and in cells of at most five characters, as the picture writes them.
const stores = {};
for (const [kind, tensors] of Object.entries({ values: scene.values, exact: scene.exact })) {
  stores[kind] = {};
  for (const [tensor, { at, planes }] of Object.entries(tensors)) {
    const place = new Map(at.map((name, i) => [name, i]));
    stores[kind][tensor] = (k, c, position) => {
      const plane = planes[keyOf(tensor, k, c)];
      const found = plane?.[place.get(position.join())];
      return found === undefined ? undefined : Number(found);
    };
  }
}
const number = (tensor, k, c, at) => stores.values[tensor]?.(k, c, at);

function short(value) {
  if (value === undefined) return "·";
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf");
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 10000) return String(value + 0);
  let text = value.toExponential(0).replace("e+", "e");
  if (size < 0.995) text = value.toFixed(2).replace("-0.00", "0.00");
  else if (size < 99.5) text = value.toFixed(1);
  else if (size < 9999.5) text = value.toFixed(0);
  return NARROW ? text.replace(/^(-?)0\./, "$1.") : text;
}

const long = (value) => // digits that a sum in float32 has
  value === undefined ? "·" : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));

// -- what is chosen --------------------------------------------------------------------------------

const chosen = { tensor: scene.opened, k: scene.k, c: scene.c, at: {}, step: 0 };
for (const [tensor, one] of Object.entries(scene.directions)) chosen.at[tensor] = one.at;
let products = [];
let rest = null; // what is not drawn: how many products, and their sum
let timer = null;

const direction = () => scene.directions[chosen.tensor];
const at = () => chosen.at[chosen.tensor];

// The channels, filters or images that a number of the result is summed over: those that are drawn.
function contracted() {
  const { over } = direction();
  if (over === "image") return [[chosen.k, chosen.c]];
  if (over === "channel")
    return scene.channels.filter((c) => c !== null && meet(chosen.k, c)).map((c) => [chosen.k, c]);
  return scene.filters.filter((k) => k !== null && meet(k, chosen.c)).map((k) => [k, chosen.c]);
}

// Every pair of positions that meets at the chosen number.
function crossed(meetings) {
  return meetings.reduce(
    (found, [, pairs]) =>
      found.flatMap(([a, b]) => pairs.map(([i, j]) => [[...a, i], [...b, j]])),
    [[[], []]]
  );
}

function gather() {
  const { operands: [first, second], meetings, terms, tensor } = direction();
  const here = meetings.map((along, i) => along[at()[i]]);
  const pairs = crossed(here);
  const count = here.reduce((n, [all]) => n * all, 1) * terms;
  let sum = 0;
  products = contracted().flatMap(([k, c]) =>
    pairs.map(([a, b]) => {
      const values = [number(first, k, c, a), number(second, k, c, b)];
      const product = values.includes(undefined) ? undefined : values[0] * values[1];
      sum = product === undefined ? undefined : sum + product;
      return { k, c, first: a, second: b, values, product, sum };
    })
  );
  const exact = stores.exact[tensor]?.(chosen.k, chosen.c, at());
  const left = count - products.length;
  rest = left ? { count: left, sum: exact === undefined ? undefined : exact - sum, total: exact } : null;
  chosen.step = steps();
}

const steps = () => products.length + (rest ? 1 : 0);
const counting = () => $("counts").checked;

function countAt(position) {
  const { meetings, terms } = direction();
  return meetings.reduce((n, along, i) => n * along[position[i]][0], terms);
}

// -- grids of cells --------------------------------------------------------------------------------

function element(tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function cellButton(kind, label, choose) {
  const button = element("button", kind);
  button.type = "button";
  button.tabIndex = -1;
  button.setAttribute("role", "gridcell");
  if (label) button.setAttribute("aria-label", label);
  if (choose) button.addEventListener("click", choose);
  return button;
}

// Arrow keys, Home and End move between the buttons of a grid; only one of them is a Tab stop.
function move(event, grid) {
  const lines = [...grid.querySelectorAll('[role="row"]')].map((line) => [...line.children]);
  const i = lines.findIndex((line) => line.includes(document.activeElement));
  if (i < 0) return;
  const j = lines[i].indexOf(document.activeElement);
  const ways = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  let target;
  if (event.key === "Home") target = lines[i].find((cell) => cell.matches("button"));
  else if (event.key === "End") target = lines[i].findLast((cell) => cell.matches("button"));
  else if (ways[event.key]) {
    const [down, right] = ways[event.key];
    for (let a = i + down, b = j + right; lines[a]?.[b]; a += down, b += right)
      if (lines[a][b].matches("button")) { target = lines[a][b]; break; } // over what is left out
  } else return;
  event.preventDefault();
  if (!target) return;
  stopAt(grid, target);
  target.focus();
}

function stopAt(grid, cell) {
  for (const each of grid.querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
  if (cell) cell.tabIndex = 0;
}

function emptyGrid(label) {
  const grid = element("div", "grid");
  grid.setAttribute("role", "grid");
  grid.setAttribute("aria-label", label);
  grid.addEventListener("keydown", (event) => move(event, grid));
  grid.addEventListener("focusin", (event) => stopAt(grid, event.target));
  return grid;
}

function row(grid, hidden) {
  const line = element("div", hidden ? "row rules" : "row");
  if (hidden) line.setAttribute("aria-hidden", "true");
  else line.setAttribute("role", "row");
  grid.append(line);
  return line;
}

// -- view 1: the channels --------------------------------------------------------------------------

const paintings = [];

function thumbnail(tensor, k, c) {
  const canvas = element("canvas");
  paintings.push(() => paint(canvas, tensor, k, c));
  return canvas;
}

// A plane in small: blue above zero, red below, the deeper the larger.
function paint(canvas, tensor, k, c) {
  const packed = scene.values[tensor];
  const plane = packed?.planes[keyOf(tensor, k, c)];
  if (!plane) return;
  const places = packed.at.map((name) => name.split(",").map(Number));
  const slice = places.length && places[0].length > 2 ? places[0].slice(0, -2).join() : "";
  const shown = places
    .map((place, i) => [place, Number(plane[i])])
    .filter(([place]) => place.slice(0, -2).join() === slice);
  const rows = [...new Set(shown.map(([place]) => place.at(-2) ?? 0))];
  const columns = [...new Set(shown.map(([place]) => place.at(-1)))];
  canvas.width = columns.length;
  canvas.height = rows.length;
  const most = Math.max(...Object.values(packed.planes).flat().map((v) => Math.abs(Number(v)) || 0));
  const context = canvas.getContext("2d");
  for (const [place, value] of shown) {
    const share = most ? Math.min(Math.abs(value) / most, 1) : 0;
    context.fillStyle = value < 0 ? `rgba(220,60,50,${share})` : `rgba(45,110,235,${share})`;
    context.fillRect(columns.indexOf(place.at(-1)), rows.indexOf(place.at(-2) ?? 0), 1, 1);
  }
}

function drawChannels() {
  const { tensor, operands } = direction();
  const planes = [...operands, tensor];
  const held = { top: planes.find((t) => t.endsWith("x")), side: planes.find((t) => t.endsWith("y")) };
  const inner = planes.find(isFilter);
  const grid = emptyGrid(`${inner} by channels: rows are channels of ${held.side}, columns of ${held.top}`);
  paintings.length = 0;
  const head = row(grid, true);
  head.append(element("span", "corner", `${inner}[k,c]`));
  for (const c of scene.channels) head.append(plane(held.top, 0, c));
  for (const k of scene.filters) {
    const line = row(grid);
    const side = plane(held.side, k, 0);
    side.setAttribute("role", "rowheader");
    line.append(side);
    for (const c of scene.channels) {
      if (k === null || c === null) {
        line.append(leftOut("pairs left out"));
      } else if (!meet(k, c)) {
        const apart = element("span", "apart");
        apart.setAttribute("role", "gridcell");
        apart.setAttribute("aria-label", `${k},${c}: of two groups, which never meet`);
        line.append(apart);
      } else {
        const cell = cellButton("pair", `${inner}[${k},${own(c)}]`, () => choosePair(k, c));
        cell.append(thumbnail(inner, k, c), element("span", "", `${k},${own(c)}`));
        cell.dataset.k = k;
        cell.dataset.c = c;
        line.append(cell);
      }
    }
  }
  const columns = scene.channels.length + 1;
  grid.style.setProperty("--pair", `min(${NARROW ? 46 : 54}px, calc((100vw - 2.4rem) / ${columns}))`);
  $("channels").replaceChildren(grid);
  for (const each of paintings) each();

  function plane(which, k, c) {
    if (which.endsWith("x") ? c === null : k === null) return leftOut("channels left out");
    const cell = element("span", "channel");
    cell.dataset[which.endsWith("x") ? "c" : "k"] = which.endsWith("x") ? c : k;
    cell.append(thumbnail(which, k, c), element("span", "", planeName(which, k, c)));
    return cell;
  }
}

function leftOut(label) {
  const gap = element("span", "gap", "·");
  gap.setAttribute("role", "gridcell");
  gap.setAttribute("aria-label", label);
  return gap;
}

// Which cells of the grid have a part, and which pair the current product is of.
function markChannels(k, c) {
  const { over, pair } = direction();
  for (const cell of $("channels").querySelectorAll("[data-k],[data-c]")) {
    const [row_, column] = [cell.dataset.k, cell.dataset.c];
    const inPair = (row_ === undefined || +row_ === k) && (column === undefined || +column === c);
    const summed = over === "channel" ? +row_ === chosen.k : over === "filter" && +column === chosen.c;
    cell.classList.toggle("sel", inPair);
    cell.classList.toggle("summed", summed && !inPair);
    if (cell.matches("button")) {
      cell.setAttribute("aria-selected", String(inPair));
      if (inPair && !cell.closest(".grid").contains(document.activeElement))
        stopAt(cell.closest(".grid"), cell);
    }
  }
  $("pair").textContent = pair.replace(/\{(\w+)\}/g, (_, word) => ({ k, c, own: own(c) })[word]);
}

function choosePair(k, c) {
  stop();
  chosen.k = k;
  chosen.c = c;
  show();
}

// -- view 2: the planes ----------------------------------------------------------------------------

let panels = [];

class Panel {
  constructor(index) {
    const { tensor, operands, planes, flipped } = direction();
    this.index = index;
    this.tensor = [...operands, tensor][index];
    this.places = planes[index];
    this.flipped = flipped && index === 1;
    this.slice = this.places.slice(0, -2).map(() => 0);
    this.cells = [];
    this.element = element("div", `panel ${["first", "second", "result"][index]}`);
    this.title = element("h3");
    this.grid = emptyGrid("");
    this.slices = element("div", "slices");
    this.element.append(this.title, this.slices, this.grid);
    this.draw();
  }

  draw() {
    const [rows, columns] = [this.places.length > 1 ? this.places.at(-2) : [0], this.places.at(-1)];
    const wide = Math.max(columns.length, 5);
    this.grid.style.setProperty("--size", `clamp(24px, calc((100vw - 3.4rem) / ${wide}), ${NARROW ? 26 : 34}px)`);
    const ruler = row(this.grid, true);
    ruler.append(element("span", "rule"));
    for (const column of columns) ruler.append(element("span", "rule", column < 0 ? "" : column ?? ""));
    rows.forEach((i, a) => {
      const line = row(this.grid);
      const label = element("span", "rule", this.places.length < 2 || i < 0 ? "" : i ?? "");
      label.setAttribute("aria-hidden", "true");
      line.append(label);
      columns.forEach((j, b) => {
        if (i === null || j === null) {
          line.append(leftOut("left out"));
          return;
        }
        const spot = this.places.length > 1 ? [a, b] : [b];
        const held = i < 0 || j < 0;
        const cell = held
          ? element("span", i === PAD || j === PAD ? "pad" : "zero", "0")
          : cellButton("c", "", () => this.choose(spot));
        if (held) {
          cell.setAttribute("role", "gridcell");
          cell.setAttribute("aria-label", cell.className === "pad" ? "padding, 0" : "zero between");
        } else if (this.index === 2) {
          cell.addEventListener("pointerenter", (event) => {
            if (event.pointerType === "mouse" && !timer) preview(this.at(spot));
          });
        }
        line.append(cell);
        this.cells.push({ cell, spot, held });
      });
    });
    if (this.index === 2) this.grid.addEventListener("pointerleave", () => preview(null));
    this.grid.querySelector("button")?.setAttribute("tabindex", "0");
  }

  at(spot) {
    const inner = this.places.slice(-2);
    return [
      ...this.slice.map((place, i) => this.places[i][place]),
      ...spot.map((place, i) => inner[i][place]),
    ];
  }

  choose(spot) {
    const position = this.at(spot);
    if (this.index === 2) {
      choose(position);
      return;
    }
    const key = this.index === 0 ? "first" : "second";
    const found = products.findIndex(
      (one) => one.k === shown().k && one.c === shown().c && one[key].join() === position.join()
    );
    if (found >= 0) stepTo(found + 1);
  }

  // Numbers, or counts, of a pair of channels; in 3-D of the slice that a position is in.
  fill(k, c, position) {
    this.slice = this.slice.map((place, i) => Math.max(this.places[i].indexOf(position[i]), 0));
    const counts = this.index === 2 && counting();
    const name = planeName(this.tensor, k, c);
    const depth = this.slice.map((place, i) => this.places[i][place]);
    const where = !depth.length ? ""
      : depth[0] < 0 ? " in the padding" : ` at ${scene.letters[LETTER[this.tensor]][0]} = ${depth[0]}`;
    this.title.textContent = `${name}${where}${this.flipped ? ", flipped" : ""}` +
      (counts ? ": counts of products" : "");
    this.grid.setAttribute("aria-label", this.title.textContent);
    this.element.classList.toggle("counting", counts);
    if (this.index === 2) this.drawSlices(depth);
    let most = 0;
    const found = this.cells.filter((one) => !one.held).map((one) => {
      const where_ = this.at(one.spot);
      const value = counts ? countAt(where_) : number(this.tensor, k, c, where_);
      most = Math.max(most, Math.abs(value) || 0);
      return [one.cell, where_, value];
    });
    for (const [cell, where_, value] of found) {
      cell.textContent = counts && value > 99999 ? value.toExponential(0).replace("e+", "e") : short(value);
      cell.style.setProperty("--share", `${Math.round((42 * Math.abs(value)) / most) || 0}%`);
      cell.classList.toggle("below", value < 0);
      const what = counts ? plural(value, "product") : depth[0] < 0 ? "is padding" : `= ${long(value)}`;
      cell.setAttribute("aria-label", `${nameOf(this.tensor, k, c, where_)} ${what}`);
    }
  }

  drawSlices(depth) {
    if (!depth.length) return;
    const buttons = this.places[0].filter((d) => d !== null).map((d) => {
      const button = element("button", d === depth[0] ? "on" : "", d);
      button.type = "button";
      button.setAttribute("aria-label", `slice ${d}`);
      button.addEventListener("click", () => choose([d, ...at().slice(1)]));
      return button;
    });
    this.slices.replaceChildren(`${scene.letters[LETTER[this.tensor]][0]} = `, ...buttons);
  }

  // Marks what has a part in the chosen number, what is added already, and what is being multiplied.
  mark(position, now) {
    const { meetings } = direction();
    const here = meetings.map((along, i) => along[position[i]]);
    const inner = here.slice(-2);
    for (const { cell, spot, held } of this.cells) {
      const where = this.at(spot);
      const under = this.index === 0 && spot.every((place, i) => inner[i][2].includes(place));
      let part = this.index === 2
        ? where.join() === position.join()
        : !held && here.every(([, pairs], i) => pairs.some((pair) => pair[this.index] === where[i]));
      cell.classList.toggle("under", under && held);
      cell.classList.toggle(this.index === 2 ? "sel" : "part", part);
      if (this.index === 2) {
        cell.setAttribute("aria-selected", String(part));
        if (part && !this.grid.contains(document.activeElement)) stopAt(this.grid, cell);
      } else {
        const place = now?.[this.index === 0 ? "first" : "second"];
        cell.classList.toggle("now", Boolean(place) && !held && where.join() === place.join());
      }
    }
  }
}

// -- telling ---------------------------------------------------------------------------------------

// The product that the player stands at; none at the beginning, and none for what is not drawn.
const now = () => products[chosen.step - 1] ?? null;
const whole = () => chosen.step === steps();
const shown = () => (whole() ? null : now()) ?? { k: chosen.k, c: chosen.c };

function tell() {
  const { tensor, operands: [first, second], over, function: name } = direction();
  const result = nameOf(tensor, chosen.k, chosen.c, at());
  const one = now();
  const added = one ? one.sum : chosen.step ? rest.total : 0;
  const count = products.length + (rest?.count ?? 0);
  const known = stores.values[tensor] !== undefined;
  const computed = number(tensor, chosen.k, chosen.c, at());
  if (count === 0) {
    $("told").textContent = tensor === "dx"
      ? `${result} is zero: no window reads this number of x, so it changes nothing in y.`
      : `${result} is zero: everything it would read lies in the padding.`;
  } else if (whole()) {
    $("told").textContent = `${result} is the sum of ${plural(count, "product")}` +
      (direction().terms > 1 ? ` over ${plural(direction().terms, over)}` : "") +
      (known ? `: ${long(rest ? rest.total : products.at(-1).sum)}.` : ".");
  } else if (!chosen.step) {
    $("told").textContent = `${result}: nothing is added yet.`;
  } else {
    const [a, b] = one.values.map(long);
    $("told").textContent =
      `${nameOf(first, one.k, one.c, one.first)} · ${nameOf(second, one.k, one.c, one.second)}` +
      (known ? ` = ${a} · ${b} = ${long(one.product)}` : "");
  }
  $("sum").textContent = !known ? "" : whole()
    ? `cupyconv.${name} gives ${long(computed)} in ${scene.dtype}.`
    : `Running sum of ${result}: ${long(added)}`;
  const unseen = rest ? `, and ${rest.count.toLocaleString("en")} not drawn` : "";
  $("place").textContent = `${Math.min(chosen.step, products.length)} of ${products.length}${unseen}`;
  const lines = [...$("ledger").querySelectorAll("tbody tr")];
  lines.forEach((line, i) => {
    line.classList.toggle("done", i < chosen.step);
    line.classList.toggle("now", i === chosen.step - 1 && !whole());
  });
  const line = lines[Math.max(chosen.step - 1, 0)];
  if (line) $("ledger").scrollTop = whole() ? 0 : line.offsetTop - $("ledger").clientHeight / 2;
}

function drawLedger() {
  const { operands: [first, second], tensor } = direction();
  const table = element("table");
  const body = element("tbody");
  const line = (texts) => {
    const made = element("tr");
    for (const text of texts) made.append(element("td", "", text));
    body.append(made);
  };
  for (const one of products)
    line([
      `${nameOf(first, one.k, one.c, one.first)} · ${nameOf(second, one.k, one.c, one.second)}`,
      `${long(one.values[0])} · ${long(one.values[1])}`, long(one.product), long(one.sum),
    ]);
  if (rest) line([`${plural(rest.count, "product")} not drawn`, "", long(rest.sum), long(rest.total)]);
  const head = element("tr");
  for (const text of ["product", "values", "is", `sum, ${tensor}`]) {
    const cell = element("th", "", text);
    cell.scope = "col";
    head.append(cell);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  $("ledger").replaceChildren(table);
}

// -- putting it together ---------------------------------------------------------------------------

function update(position = at()) {
  const { k, c } = shown();
  const one = whole() ? null : now();
  markChannels(k, c);
  panels.forEach((panel, i) => {
    const start = one ?? products.find((each) => each.k === k && each.c === c);
    const where = i === 2 ? position : start ? start[i === 0 ? "first" : "second"] : [];
    panel.fill(k, c, where);
    panel.mark(position, one);
  });
  $("step").value = chosen.step;
  $("step").setAttribute("aria-valuetext", $("place").textContent);
  tell();
}

function show() {
  gather();
  $("step").max = steps();
  drawLedger();
  update();
  const { tensor } = direction();
  address(`#${tensor}=${indexOf(tensor, chosen.k, chosen.c, at()).join()}`);
}

function address(text) {
  try {
    history.replaceState(null, "", text);
  } catch { /* a page inside a notebook has no address of its own */ }
}

function choose(position) {
  stop();
  chosen.at[chosen.tensor] = position;
  show();
}

// While the mouse rests on a number of the result, what makes it is marked.
function preview(position) {
  if (timer) return;
  panels.forEach((panel) => panel.mark(position ?? at(), whole() || position ? null : now()));
}

function stepTo(step) {
  chosen.step = Math.max(0, Math.min(step, steps()));
  update();
}

function stop() {
  clearInterval(timer);
  timer = null;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-pressed", "false");
  $("told").setAttribute("aria-live", "polite");
}

function play() {
  if (timer) return stop();
  if (chosen.step >= steps()) chosen.step = 0;
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-pressed", "true");
  $("told").setAttribute("aria-live", "off"); // a sentence for every product is too much to hear
  const pause = Math.max(60, Math.min(700, 12000 / steps()));
  const tick = () => {
    stepTo(chosen.step + 1);
    if (chosen.step >= steps()) stop();
  };
  timer = setInterval(tick, pause);
  tick();
}

function turnTo(tensor) {
  stop();
  chosen.tensor = tensor;
  const { title, operands: [first, second], rule, first: note, planes } = direction();
  document.querySelector(`input[value="${tensor}"]`).checked = true;
  $("channels-title").textContent = title;
  $("rule").textContent = `${rule}. ${note}`;
  $("name-first").textContent = `of ${first}`;
  $("name-second").textContent = `of ${second}`;
  $("name-result").textContent = tensor;
  $("key-zero").hidden = !planes[0].some((places) => places.includes(ZERO));
  $("planes-title").textContent = `The planes of one pair: ${first}, ${second} → ${tensor}`;
  drawChannels();
  panels = [0, 1, 2].map((index) => new Panel(index));
  $("planes").replaceChildren(...panels.flatMap((panel, i) =>
    i ? [element("span", "sign", i === 1 ? "∗" : "→"), panel.element] : [panel.element]));
  show();
}

// #dw=2,1,0,0 chooses a number of a result, if it is drawn.
function fromAddress() {
  const match = /^#(dw|dx|y)=(\d+(?:,\d+)*)$/.exec(location.hash);
  if (!match) return false;
  const [a, b, ...position] = match[2].split(",").map(Number);
  const { meetings } = scene.directions[match[1]];
  if (position.length !== meetings.length || !position.every((p, i) => meetings[i][p])) return false;
  let [k, c] = [chosen.k, chosen.c];
  if (match[1] === "dw") [k, c] = [a, Math.floor(a / scene.groupFilters) * scene.groupChannels + b];
  else if (a !== scene.image) return false;
  else if (match[1] === "y") [k, c] = [b, meet(b, c) ? c : scene.channels.find((i) => meet(b, i))];
  else [k, c] = [meet(k, b) ? k : scene.filters.find((i) => i !== null && meet(i, b)), b];
  if (!scene.filters.includes(k) || !scene.channels.includes(c)) return false;
  Object.assign(chosen, { k, c });
  chosen.at[match[1]] = position;
  turnTo(match[1]);
  return true;
}

for (const [tensor, { operands }] of Object.entries(scene.directions)) {
  const label = element("label");
  const radio = element("input");
  Object.assign(radio, { type: "radio", name: "direction", value: tensor });
  radio.addEventListener("change", () => turnTo(tensor));
  label.append(radio, element("span", "", `${operands.join(", ")} → ${tensor}`));
  $("directions").append(label);
}
$("first").addEventListener("click", () => { stop(); stepTo(0); });
$("back").addEventListener("click", () => { stop(); stepTo(chosen.step - 1); });
$("next").addEventListener("click", () => { stop(); stepTo(whole() ? 1 : chosen.step + 1); });
$("last").addEventListener("click", () => { stop(); stepTo(steps()); });
$("play").addEventListener("click", play);
$("step").addEventListener("input", (event) => { stop(); stepTo(+event.target.value); });
$("counts").addEventListener("change", () => update());
if (!Object.keys(scene.values).length) { // too many numbers to draw: only counts are known
  $("counts").checked = true;
  $("counts").disabled = true;
}
$("blocks").textContent = scene.groups > 1
  ? `${scene.groups} groups, the blocks of the grid, never meet.` : "";
$("source").textContent = scene.source
  ? `Values: ${scene.source}${scene.images > 1 ? `; image ${scene.image} of ${scene.images}` : ""}.` : "";
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { stop(); stepTo(steps()); }
});
addEventListener("hashchange", fromAddress);
$("live").hidden = false;
if (!fromAddress()) turnTo(scene.opened);
document.documentElement.dataset.ready = "true";
