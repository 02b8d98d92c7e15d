// Draws a scene in two linked views: a grid of channel pairs, and the planes of one pair.  Long axes
// are drawn in part: the drawn part follows the chosen element, by the rules of scene.py.  The first
// scene has the values of page.py, which may be only those around the element that the page was
// written for.  The scenes of turned knobs have all values.
const $ = (id) => document.getElementById(id);
const original = firstScene(JSON.parse($("scene").textContent));
let scene = original;
const PAD = -1;
const ZERO = -2;
const NARROW = innerWidth < 600;
const FRAMED = self !== top; // part of another page, such as a notebook
const TENSORS = ["x", "dx", "w", "dw", "y", "dy"];

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const own = (c) => c % scene.problem.groupChannels; // c within its group, as in w and dw
const meet = (k, c) =>
  Math.floor(k / scene.problem.groupFilters) === Math.floor(c / scene.problem.groupChannels);
const isFilter = (tensor) => tensor === "w" || tensor === "dw";
const keyOf = (tensor, k, c) =>
  isFilter(tensor) ? `${k},${own(c)}` : String(tensor.endsWith("x") ? c : k);
// The layer's name of a tensor of the problem: a transposed layer has other names.  Also the reverse.
const called = scenes.naming(original.isTransposed);
const planeName = (tensor, k, c) => `${called(tensor)}[${keyOf(tensor, k, c)}]`;
const sizesOf = (tensor) => tensors.sizeOf(scene.problem, tensor);
const lettersOf = (tensor) =>
  scenes.LETTERS[{ x: "input", w: "filter", y: "output" }[tensor.at(-1)]][scene.problem.rank];

function indexOf(tensor, k, c, at) {
  if (isFilter(tensor)) return [k, own(c), ...at];
  return [chosen.image, tensor.endsWith("x") ? c : k, ...at];
}

const nameOf = (tensor, k, c, at) => `${called(tensor)}[${indexOf(tensor, k, c, at).join(",")}]`;

// Returns the scene of the first layer, from the data of the page.
function firstScene(data) {
  const blank = scenes.blank(data.knobs.layer, data);
  for (const [tensor, one] of Object.entries(data.directions)) Object.assign(blank.directions[tensor], one);
  return { ...blank, ...data, directions: blank.directions };
}

// Returns the scene of a state of the knobs.  In the scene of the first layer, results are the
// library's where the page contains them; the page itself generates x, w and dy of small layers.  A
// scene of another image of the current layer reuses the computed tensors.
function sceneOf(knobs, image) {
  if (knobs === original.knobs && !original.computes) return original;
  const made = scenes.of(knobs, original, image, scene.knobs === knobs ? scene.data : null);
  if (knobs !== original.knobs) return made;
  const { opened, directions, source } = original;
  return { ...made, opened, directions, source, library: image === original.image ? original.library : {} };
}

// Functions that return the value of a tensor at a position: stores.library for results of the
// library, stores.values for operands and for float64 sums.
let stores = {};

function readers(packed, isFloat32) {
  const found = {};
  for (const [tensor, { at, planes }] of Object.entries(packed)) {
    const places = at.map((drawn_) => new Map(drawn_.map((one, i) => [one, i])));
    // A float32 is written with the fewest digits that determine it.
    const restored = isFloat32(tensor) ? Math.fround : Number;
    found[tensor] = (k, c, position) => {
      const value = planes[keyOf(tensor, k, c)]?.[
        position.reduce((place, one, i) => place * at[i].length + places[i].get(one), 0)];
      return value === undefined ? undefined : restored(Number(value));
    };
  }
  return found;
}

const hasImage = (tensor) => isFilter(tensor) || chosen.image === scene.image;
const read = (store, tensor, k, c, at) => hasImage(tensor) ? store[tensor]?.(k, c, at) : undefined;
const byLibrary = (tensor, k, c, at) => read(stores.library, tensor, k, c, at);
const exactly = (tensor, k, c, at) => read(stores.values, tensor, k, c, at);
const number = (tensor, k, c, at) => byLibrary(tensor, k, c, at) ?? exactly(tensor, k, c, at);

// Returns a number in at most five characters for a cell, by the same rules as values.py.
function short(value) {
  if (value === undefined) return "?";
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf");
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 10000) return String(value + 0);
  let text = value.toExponential(0).replace("e+", "e");
  if (size < 0.995) text = value.toFixed(2).replace("-0.00", "0.00");
  else if (size < 99.5) text = value.toFixed(1);
  else if (size < 9999.5) text = value.toFixed(0);
  return NARROW ? text.replace(/^(-?)0\./, "$1.") : text;
}

const long = (value) => // six significant digits, as many as a float32 sum has
  value === undefined ? "?" : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(6)));

// -- the chosen element ----------------------------------------------------------------------------

const chosen = { at: {}, step: 0 };
let look = {}; // by tensor, an operand position to draw besides the positions of the sum
let drawn = null; // drawn positions and channels, and the pairs of positions
let products = [];
let rest = null; // count and sum of the products that are not drawn
let timer = null;

const direction = () => scene.directions[chosen.tensor];
const at = () => chosen.at[chosen.tensor];

// Sets the scene to draw.  The chosen element stays chosen; indices that do not exist become the last.
function load(next) {
  const isNew = scene.problem.rank !== next.problem.rank || !Object.keys(chosen.at).length;
  scene = next;
  drawn = null;
  look = {};
  const isFloat32 = original.dtype === "float32";
  stores = { library: readers(scene.library, () => isFloat32),
    values: readers(scene.values, (tensor) => isFloat32 && !scene.directions[tensor]) };
  chosen.image = scene.image;
  chosen.k = Math.min(chosen.k, scene.problem.K - 1);
  chosen.c = Math.min(chosen.c, scene.problem.C - 1);
  if (!meet(chosen.k, chosen.c)) chosen.c = Math.floor(chosen.k / scene.problem.groupFilters) * scene.problem.groupChannels;
  for (const [tensor, one] of Object.entries(scene.directions)) {
    const sizes = sizesOf(tensor).slice(2);
    chosen.at[tensor] = isNew ? one.at : chosen.at[tensor].map((place, i) => Math.min(place, sizes[i] - 1));
  }
  const hasNumbers = Object.keys({ ...scene.library, ...scene.values }).length > 0;
  if (!hasNumbers || $("counts").disabled) $("counts").checked = !hasNumbers; // no numbers: show the counts
  $("counts").disabled = !hasNumbers;
  $("blocks").textContent = scene.problem.groups > 1
    ? `The ${scene.problem.groups} groups are separate blocks of the grid.` : "";
}

// -- the drawn part, by the rules of scene.py ------------------------------------------------------

const span = (first, end) => Array.from({ length: Math.max(end - first, 0) }, (_, i) => first + i);

function withGaps(positions) {
  const places = [];
  for (const at of [...new Set(positions)].sort((a, b) => a - b)) {
    const before = places.at(-1) ?? at;
    if (at - before === 2) places.push(before + 1); // takes no more room than the sign for a gap
    else if (at - before > 2) places.push(null);
    places.push(at);
  }
  return places;
}

// Returns the positions of an axis to draw: both ends, and the needed position with its neighbours.
function ends(size, room, needed) {
  if (size <= room) return span(0, size);
  const head = Math.floor(room / 2);
  const outer = [...span(0, head), ...span(size - (room - head - 1), size)];
  const near = span(needed - 1, needed + 2).filter((at) => 0 <= at && at < size);
  if (near.every((at) => outer.includes(at))) return withGaps(outer);
  const side = Math.max(Math.floor((room - near.length - 2) / 2), 1);
  return withGaps([...span(0, side), ...near, ...span(size - side, size)]);
}

const corner = (rule, at) => at * rule.stride - rule.pad_before;

// Returns the outputs of an axis to draw, and the input positions to draw with their windows.
function linked(rule, needed, places) {
  const { input, output } = rule;
  const [first, end] = [Math.min(-rule.pad_before, 0), Math.max(input + rule.pad_after, input)];
  if (end - first <= scene.limits.places && output <= scene.limits.places)
    return [span(0, output), span(first, end)];
  const whole = rule.effective_filter <= scene.limits.span;
  let outputs, inputs;
  for (const [head, tail] of [[4, 4], [4, 3], [3, 3], [3, 2], [2, 2], [2, 1], [1, 1], [1, 0]]) {
    outputs = new Set([
      ...span(0, Math.min(head, output)), ...span(Math.max(output - tail, 0), output), needed,
    ]);
    const under = [...outputs].flatMap((at) => {
      const [begin, last] = [corner(rule, at), corner(rule, at) + rule.effective_filter - 1];
      return whole ? span(begin, last + 1) : [begin, last];
    });
    inputs = withGaps(
      [first, 0, input - 1, end - 1, ...places, ...under].filter((at) => first <= at && at < end)
    );
    if (inputs.length <= scene.limits.places) break;
  }
  outputs.add(output - 1); // draw the last output even without its window
  for (const place of whole ? inputs : []) { // add the outputs whose windows are already drawn
    const at = place === null ? -1 : (place + rule.pad_before) / rule.stride;
    const taps = span(0, rule.filter).map((tap) => corner(rule, at) + tap * rule.dilation);
    if (Number.isInteger(at) && 0 <= at && at < output && taps.every((tap) => inputs.includes(tap)))
      outputs.add(at);
  }
  return [withGaps(outputs), inputs];
}

// Returns the content of a cell of the first operand: a position, PAD, ZERO or null.
function content(tensor, axis, place) {
  if (place === null) return null;
  if (tensor !== "dx") return 0 <= place && place < axis.input ? place : PAD;
  if (place < 0 || place > (axis.output - 1) * axis.stride) return PAD;
  return place % axis.stride ? ZERO : place / axis.stride;
}

// Returns the planes and channels to draw around the chosen element and the looked-at operand.
function layout() {
  const { tensor, k, c } = chosen;
  const planes = [[], [], []];
  const places = []; // positions of the first operand, padding included
  scene.problem.axes.forEach((axis, i) => {
    const wanted = tensor === "dw" ? look.dy?.[i] ?? chosen.at.y[i] : at()[i];
    const looked = { dw: look.x?.[i], y: look.x?.[i], dx: look.dy && look.dy[i] * axis.stride }[tensor];
    const rule = tensor === "dx" ? scene.directions.dx.rules[i] : axis;
    const [outputs, first] = linked(rule, wanted, looked === undefined ? [] : [looked]);
    const taps = ends(axis.filter, scene.limits.taps, look.w?.[i] ?? chosen.at.dw[i]);
    places.push(first);
    planes[0].push(first.map((place) => content(tensor, axis, place)));
    planes[1].push(tensor === "dw" ? outputs : tensor === "dx" ? taps.toReversed() : taps);
    planes[2].push(tensor === "dw" ? taps : outputs);
  });
  const known = new Map();
  const meeting = (i, position) => {
    const key = `${i},${position}`;
    if (!known.has(key)) {
      const every = scenes.meetings(tensor, scene.problem.axes[i], position);
      const pairs = every.filter(([a, b]) => planes[0][i].includes(a) && planes[1][i].includes(b));
      const rule = scene.directions[tensor].rules[i];
      const under = places[i].flatMap((place, cell) => {
        const distance = place === null ? -1 : place - corner(rule, position);
        const inside = distance >= 0 && distance < rule.effective_filter;
        return inside && distance % rule.dilation === 0 ? [cell] : [];
      });
      known.set(key, [every.length, pairs, under]);
    }
    return known.get(key);
  };
  const pairs = at().reduce((n, position, i) => n * meeting(i, position)[1].length, 1);
  const filters = ends(scene.problem.K, scene.limits.channels, k);
  const channels = ends(scene.problem.C, scene.limits.channels, c);
  return { tensor, planes, meeting, pairs, filters, channels };
}

// Returns whether the old layout shows at least as many terms of the chosen element as the next one.
function holds(old, next) {
  const shows = (plane, position) => position.every((one, i) => plane[i].includes(one));
  return old?.tensor === next.tensor && old.filters.includes(chosen.k) &&
    old.channels.includes(chosen.c) && shows(old.planes[2], at()) &&
    at().reduce((n, one, i) => n * old.meeting(i, one)[1].length, 1) >= next.pairs &&
    direction().operands.every((tensor, i) => !look[tensor] || shows(old.planes[i], look[tensor]));
}

// Returns the drawn positions of an axis as "h 0–4, 99 of 100 (94 hidden)"; empty if all are drawn.
function cutText(letter, places, size) {
  const shown = [...new Set(places.filter((one) => one !== null && one >= 0))].sort((a, b) => a - b);
  if (shown.length === size) return "";
  const begins = shown.filter((one) => !shown.includes(one - 1));
  const lasts = shown.filter((one) => !shown.includes(one + 1));
  const runs = begins.map((one, i) => (one === lasts[i] ? one : `${one}–${lasts[i]}`));
  const [count, hidden] = [size, size - shown.length].map((one) => one.toLocaleString("en"));
  return `${letter} ${runs.join(", ")} of ${count} (${hidden} hidden)`;
}

// Returns the drawn pairs of channels that the sum of the chosen element runs over.
function contracted() {
  const { over } = direction();
  if (over === "image") return [[chosen.k, chosen.c]];
  if (over === "channel")
    return drawn.channels.filter((c) => c !== null && meet(chosen.k, c)).map((c) => [chosen.k, c]);
  return drawn.filters.filter((k) => k !== null && meet(k, chosen.c)).map((k) => [k, chosen.c]);
}

// Returns all combinations of the position pairs of each axis.
function crossed(axes) {
  return axes.reduce(
    (made, [, pairs]) =>
      made.flatMap(([a, b]) => pairs.map(([i, j]) => [[...a, i], [...b, j]])),
    [[[], []]]
  );
}

function gather() {
  const { operands: [first, second], terms } = direction();
  const here = at().map((position, i) => drawn.meeting(i, position));
  const pairs = crossed(here);
  const count = here.reduce((n, [all]) => n * all, 1) * terms;
  let sum = 0;
  products = contracted().flatMap(([k, c]) =>
    pairs.map(([a, b]) => {
      const values = [number(first, k, c, a), number(second, k, c, b)];
      const product = values.includes(undefined) ? undefined : values[0] * values[1];
      sum = product === undefined || sum === undefined ? undefined : sum + product;
      return { k, c, first: a, second: b, values, product, sum };
    })
  );
  const exact = exactly(chosen.tensor, chosen.k, chosen.c, at());
  const left = count - products.length;
  const more = exact === undefined || sum === undefined ? undefined : exact - sum;
  rest = left ? { count: left, sum: more, total: exact } : null;
  chosen.step = steps();
}

const steps = () => products.length + (rest ? 1 : 0);

// -- grids of cells --------------------------------------------------------------------------------

// Returns an element with a class; its children are elements and texts.
function element(tag, kind, ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

// Sets attributes of an element, and returns it.
function attributed(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Returns a button that calls a function when it is pressed.
function buttonOf(kind, act, attributes, ...children) {
  const button = attributed(element("button", kind, ...children), { type: "button", ...attributes });
  button.addEventListener("click", act);
  return button;
}

// Arrow keys, Home and End move between the buttons of a grid; only one button is a Tab stop.
// Where the next cell is a gap, or its row has no button, grid.enter moves the drawn part.
function move(event, grid) {
  const lines = [...grid.querySelectorAll('[role="row"]')].map((line) => [...line.children]);
  const i = lines.findIndex((line) => line.includes(document.activeElement));
  if (i < 0) return;
  const j = lines[i].indexOf(document.activeElement);
  const arrows = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  let target;
  if (event.key === "Home") target = lines[i].find((cell) => cell.matches("button"));
  else if (event.key === "End") target = lines[i].findLast((cell) => cell.matches("button"));
  else if (arrows[event.key]) {
    const [down, right] = arrows[event.key];
    let [a, b] = [i + down, j + right];
    while (lines[a]?.[b] && !lines[a][b].matches("button,.gap")) [a, b] = [a + down, b + right];
    target = lines[a]?.[b]?.matches("button") ? lines[a][b] : null;
    if (!target) grid.enter(lines[i][j], down, right);
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
  const grid = attributed(element("div", "grid"), { role: "grid", "aria-label": label });
  grid.addEventListener("keydown", (event) => move(event, grid));
  grid.addEventListener("focusin", (event) => stopAt(grid, event.target));
  return grid;
}

function row(grid, hidden) {
  const line = hidden ? attributed(element("div", "row rules"), { "aria-hidden": true })
    : attributed(element("div", "row"), { role: "row" });
  grid.append(line);
  return line;
}

// -- view 1: the channels --------------------------------------------------------------------------

let largest = {}; // largest absolute value of each tensor on the page, for the colors of its thumbnails

function thumbnail(tensor, k, c) {
  if (!hasImage(tensor) || !packedOf(tensor)?.planes[keyOf(tensor, k, c)]) {
    drawn.unknown.add(tensor);
    return element("span", "unknown", "?");
  }
  const canvas = element("canvas");
  canvas.title = thumbnailTitle(tensor);
  paint(canvas, tensor, k, c);
  return canvas;
}

// The values of thumbnails: the library's if the page contains all that are drawn.
const packedOf = (tensor) => (scene.data ? null : scene.library[tensor]) ?? scene.values[tensor];

// Returns the positions of each axis in a thumbnail; a 3-D thumbnail shows the first slice.
const painted = ({ at }) => at.map((places, i) => (i < at.length - 2 ? places.slice(0, 1) : places));

// Returns the title of a thumbnail, which says if a plane is drawn only in part.
function thumbnailTitle(tensor) {
  const [letters, sizes] = [lettersOf(tensor), sizesOf(tensor).slice(2)];
  const cuts = painted(packedOf(tensor)).map((places, i) => cutText(letters[i], places, sizes[i])).filter(Boolean);
  return cuts.length ? `Drawn in part: ${cuts.join("; ")}` : "";
}

function largestOf(planes) {
  let most = 0;
  for (const plane of Object.values(planes))
    for (const value of plane) most = Math.max(most, Math.abs(Number(value)) || 0);
  return most;
}

// Paints a small plane: blue for positive and red for negative values, deeper for larger ones.
function paint(canvas, tensor, k, c) {
  const packed = packedOf(tensor);
  const [columns, rows = 1] = painted(packed).map((places) => places.length).reverse();
  const plane = packed.planes[keyOf(tensor, k, c)];
  const most = (largest[tensor] ??= largestOf(packed.planes));
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const value = Number(plane[i]);
    const share = most ? Math.min(Math.abs(value) / most, 1) : 0;
    image.data.set([...(value < 0 ? [220, 60, 50] : [45, 110, 235]), Math.round(255 * share)], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

function drawChannels() {
  const { tensor, operands } = direction();
  const planes = [...operands, tensor];
  const top = planes.find((t) => t.endsWith("x"));
  const side = planes.find((t) => t.endsWith("y"));
  const inner = planes.find(isFilter);
  const grid = emptyGrid(`${inner} by channels: rows are channels of ${called(side)}, columns of ${called(top)}`);
  grid.enter = enterChannels;
  largest = {};
  drawn.unknown = new Set();
  const head = row(grid, true);
  head.append(element("span", "corner", `${inner}[k,c]`));
  for (const c of drawn.channels) head.append(plane(top, 0, c));
  for (const k of drawn.filters) {
    const line = row(grid);
    const header = plane(side, k, 0);
    header.setAttribute("role", "rowheader");
    line.append(header);
    for (const c of drawn.channels) {
      if (k === null || c === null) {
        line.append(leftOut("pairs left out"));
      } else if (!meet(k, c)) {
        line.append(attributed(element("span", "apart"),
          { role: "gridcell", "aria-label": `${k},${c}: different groups, no product` }));
      } else {
        line.append(buttonOf("pair", () => choosePair(k, c), { tabindex: -1, role: "gridcell",
          "aria-label": `${inner}[${k},${own(c)}]`, "data-k": k, "data-c": c },
          thumbnail(inner, k, c), element("span", "", `${k},${own(c)}`)));
      }
    }
  }
  const cuts = [
    cutText(`k of ${called(side)} and ${inner}`, drawn.filters, scene.problem.K),
    cutText(`c of ${called(top)}`, drawn.channels, scene.problem.C),
  ].filter(Boolean);
  $("cut").textContent = cuts.length ? `Drawn: ${cuts.join("; ")}.` : "";
  const columns = drawn.channels.length + 1;
  grid.classList.toggle("dense", NARROW && Math.max(scene.problem.K, scene.problem.C) > 100);
  grid.style.setProperty("--pair", `min(${NARROW ? 46 : 54}px, calc((100vw - 2.4rem) / ${columns}))`);
  $("channels").replaceChildren(grid);

  function plane(which, k, c) {
    const [name, channel] = which.endsWith("x") ? ["data-c", c] : ["data-k", k];
    if (channel === null) return leftOut("hidden channels");
    return attributed(element("span", "channel", thumbnail(which, k, c),
      element("span", "", planeName(which, k, c))), { [name]: channel });
  }
}

// Chooses the pair next to a drawn pair; across groups, the first pair of the next group.
function enterChannels(cell, down, right) {
  let [k, c] = [+cell.dataset.k + down, +cell.dataset.c + right];
  if (k < 0 || c < 0 || k >= scene.problem.K || c >= scene.problem.C) return;
  if (!meet(k, c) && down) c = Math.floor(k / scene.problem.groupFilters) * scene.problem.groupChannels;
  if (!meet(k, c)) k = Math.floor(c / scene.problem.groupChannels) * scene.problem.groupFilters;
  choosePair(k, c);
  $("channels").querySelector("button.sel").focus();
}

function leftOut(label) {
  return attributed(element("span", "gap", "…"), { role: "gridcell", "aria-label": label });
}

// Marks the cells of the grid that the sum uses, and the pair of the current product.
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
    const { operands, flipped } = direction();
    this.index = index;
    this.tensor = [...operands, chosen.tensor][index];
    this.places = drawn.planes[index];
    this.letters = lettersOf(this.tensor);
    this.flipped = flipped && index === 1;
    this.slice = this.places.slice(0, -2).map(() => 0);
    this.cells = [];
    this.title = element("h3");
    this.grid = emptyGrid("");
    this.grid.enter = (cell, down, right) => this.enter(cell, down, right);
    this.slices = element("div", "slices");
    const sizes = sizesOf(this.tensor).slice(2);
    const cuts = this.places.map((places, i) => cutText(this.letters[i], places, sizes[i]));
    this.element = element("div", `panel ${["first", "second", "result"][index]}`, this.title,
      element("p", "cut", cuts.filter(Boolean).join("\n")), this.slices, this.grid);
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
      line.append(attributed(element("span", "rule", this.places.length < 2 || i < 0 ? "" : i ?? ""),
        { "aria-hidden": true }));
      columns.forEach((j, b) => {
        if (i === null || j === null) {
          line.append(leftOut("left out"));
          return;
        }
        const spot = this.places.length > 1 ? [a, b] : [b];
        const isPad = i === PAD || j === PAD;
        const isEmpty = i < 0 || j < 0; // padding or a zero of the dilation
        const cell = isEmpty
          ? attributed(element("span", isPad ? "pad" : "zero"),
            { role: "gridcell", "aria-label": isPad ? "padding, 0" : "zero of the dilation" })
          : buttonOf("c", () => this.choose(spot), { tabindex: -1, role: "gridcell" });
        if (this.index === 2)
          cell.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && preview(this.at(spot)));
        line.append(cell);
        this.cells.push({ cell, spot, isEmpty });
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
    $("hand-name").value = nameOf(this.tensor, shown().k, shown().c, position);
    $("hand-value").value = number(this.tensor, shown().k, shown().c, position) ?? "";
    const found = products.findIndex(
      (one) => one.k === shown().k && one.c === shown().c && one[key].join() === position.join()
    );
    if (found >= 0) stepTo(found + 1);
  }

  // Chooses a position of the result, or draws the surroundings of a position of an operand.
  reach(position) {
    if (this.index === 2) choose(position);
    else {
      look = { ...look, [this.tensor]: position };
      show();
    }
  }

  enter(cell, down, right) {
    const position = [...this.at(this.cells.find((one) => one.cell === cell).spot)];
    const sign = this.flipped ? -1 : 1;
    const rank = position.length;
    if (rank > 1) position[rank - 2] += sign * down;
    else if (down) return;
    position[rank - 1] += sign * right;
    const sizes = sizesOf(this.tensor).slice(2);
    if (!position.every((one, i) => 0 <= one && one < sizes[i])) return;
    this.reach(position);
    panels[this.index].focus(position);
  }

  focus(position) {
    const entry = this.cells.find(
      ({ spot, isEmpty }) => !isEmpty && this.at(spot).join() === position.join()
    );
    if (!entry) return;
    stopAt(this.grid, entry.cell);
    entry.cell.focus();
  }

  // Writes the values or counts of a pair of channels into the cells; a 3-D plane shows the slice
  // that contains the position.
  fill(k, c, position) {
    this.slice = this.slice.map((place, i) =>
      this.places[i].indexOf(position[i] ?? this.places[i].find((one) => one >= 0 && one !== null)));
    const counts = this.index === 2 && $("counts").checked;
    const depth = this.slice.map((place, i) => this.places[i][place]);
    const where = depth.length ? ` at ${this.letters[0]} = ${depth[0]}` : "";
    const { terms, noun } = direction();
    this.title.textContent = planeName(this.tensor, k, c) + where + (this.flipped ? ", flipped" : "") +
      (this.index === 2 && terms > 1 ? `, the sum over ${plural(terms, noun)}` : "") +
      (counts ? ": counts of products" : "");
    this.grid.setAttribute("aria-label", this.title.textContent);
    this.element.classList.toggle("counting", counts);
    this.drawSlices(depth);
    let most = 0;
    const filled = this.cells.filter((one) => !one.isEmpty).map((one) => {
      const where_ = this.at(one.spot);
      const value = counts ? where_.reduce((n, one, i) => n * drawn.meeting(i, one)[0], direction().terms)
        : number(this.tensor, k, c, where_);
      most = Math.max(most, Math.abs(value) || 0);
      if (value === undefined) unknown.add(this.tensor);
      return [one.cell, where_, value];
    });
    for (const [cell, where_, value] of filled) {
      cell.textContent = counts && value > 99999 ? value.toExponential(0).replace("e+", "e") : short(value);
      cell.style.setProperty("--share", `${Math.round((42 * Math.abs(value)) / most) || 0}%`);
      cell.classList.toggle("below", value < 0);
      const what = counts ? plural(value, "product") : value === undefined ? "has no value on this page" : `= ${long(value)}`;
      cell.setAttribute("aria-label", `${nameOf(this.tensor, k, c, where_)} ${what}`);
    }
  }

  drawSlices(depth) {
    if (!depth.length) return;
    const inner = this.index === 2 ? at().slice(1) : this.at(this.cells.find((one) => !one.isEmpty).spot).slice(1);
    const size = sizesOf(this.tensor)[2];
    const buttons = [];
    let next = 0; // slice that follows the previous button's slice
    for (const place of this.places[0]) {
      if (place < 0) continue; // padding and zeros are not slices of the tensor
      const d = place ?? next;
      if (place === null && (d < 0 || d >= size || this.places[0].includes(d))) continue;
      buttons.push(buttonOf(place === depth[0] ? "on" : "", () => this.reach([d, ...inner]),
        { "aria-label": place === null ? `hidden slices, from ${d}` : `slice ${d}` }, place ?? "…"));
      next = d + (this.flipped ? -1 : 1);
    }
    this.slices.replaceChildren(`${this.letters[0]} = `, ...buttons);
  }

  // Marks the chosen element of the result, or the factors of its terms and of the current product.
  mark(position, now) {
    const here = position.map((one, i) => drawn.meeting(i, one));
    const inner = here.slice(-2);
    for (const { cell, spot, isEmpty } of this.cells) {
      const where = this.at(spot);
      const under = this.index === 0 && spot.every((place, i) => inner[i][2].includes(place));
      let part = this.index === 2
        ? where.join() === position.join()
        : !isEmpty && here.every(([, pairs], i) => pairs.some((pair) => pair[this.index] === where[i]));
      cell.classList.toggle("under", under && isEmpty);
      cell.classList.toggle(this.index === 2 ? "sel" : "part", part);
      if (this.index === 2) {
        cell.setAttribute("aria-selected", String(part));
        if (part && !this.grid.contains(document.activeElement)) stopAt(this.grid, cell);
      } else {
        const place = now?.[this.index === 0 ? "first" : "second"];
        cell.classList.toggle("now", Boolean(place) && !isEmpty && where.join() === place.join());
        cell.classList.toggle("looked", !isEmpty && where.join() === look[this.tensor]?.join());
      }
    }
  }
}

// -- texts -----------------------------------------------------------------------------------------

// The current product of the player; null at the beginning and for products that are not drawn.
const now = () => products[chosen.step - 1] ?? null;
const whole = () => chosen.step === steps();
const shown = () => (whole() ? null : now()) ?? { k: chosen.k, c: chosen.c };

let unknown = new Set(); // tensors with drawn cells without a value

// Returns why cells of a tensor have no values, and the option that adds the values.
function reasonFor(tensor) {
  if (scene.missing[tensor]) return scene.missing[tensor];
  const { k, c } = chosen;
  const near = (one, size) => Math.max(0, Math.min(one, size - 1));
  let name = nameOf(chosen.tensor, k, c, at());
  if (look.w) name = nameOf("y", k, c, scene.problem.axes.map((axis) => axis.output >> 1));
  else if (look.dy && chosen.tensor === "dx")
    name = nameOf("dx", k, c, scene.problem.axes.map((axis, i) => near(corner(axis, look.dy[i]), axis.input)));
  else if (look.x || look.dy)
    name = nameOf("y", k, c, scene.problem.axes.map((axis, i) => look.dy?.[i] ??
      near(Math.floor((look.x[i] + axis.pad_before) / axis.stride), axis.output)));
  return `This page has only a part of the values. For the terms of ${name}, pass --element '${name}' ` +
    `to cupyconv explain, or '${name}' to element() of the explanation in Python.`;
}

function tell() {
  const { tensor, operands: [first, second], noun, function: name } = direction();
  const result = nameOf(tensor, chosen.k, chosen.c, at());
  const one = now();
  $("player").hidden = $("ledger").hidden = !steps();
  const added = one ? one.sum : chosen.step ? rest.total : 0;
  const count = products.length + (rest?.count ?? 0);
  const total = rest ? rest.total : products.at(-1)?.sum;
  const computed = byLibrary(tensor, chosen.k, chosen.c, at());
  if (count === 0) {
    $("told").textContent = tensor === "dx" && original.isTransposed
      ? `${result} is the bias: no input reaches this element.`
      : tensor === "dx" ? `${result} is zero: no window reads this element of x, so it does not affect y.`
      : `${result} is zero: it reads only padding.`;
  } else if (whole()) {
    $("told").textContent = `${result} is the sum of ${plural(count, "product")}` +
      (direction().terms > 1 ? ` over ${plural(direction().terms, noun)}` : "") +
      (total === undefined ? "." : `: ${long(total)}.`);
  } else if (!chosen.step) {
    $("told").textContent = `${result}: no product is added yet.`;
  } else {
    const [a, b] = one.values.map(long);
    $("told").textContent =
      `${nameOf(first, one.k, one.c, one.first)} · ${nameOf(second, one.k, one.c, one.second)}` +
      (one.product === undefined ? "" : ` = ${a} · ${b} = ${long(one.product)}`);
  }
  $("sum").textContent = !whole()
    ? `Running sum of ${result}: ${added === undefined ? "not known on this page" : long(added)}`
    : computed === undefined && scene.data
      ? `The page computes ${long(number(tensor, chosen.k, chosen.c, at()))} in float64. In Python: cupyconv.${name}.`
    : computed === undefined ? `The result of cupyconv.${name} is not shown; the reason is below.`
    : `cupyconv.${name} gives ${long(computed)} in ${scene.dtype}.`;
  const reasons = new Set([...unknown, ...drawn.unknown].map(reasonFor));
  $("missing").textContent = reasons.size ? `? marks an omitted value. ${[...reasons].join(" ")}` : "";
  const unseen = rest ? ` (${plural(rest.count, "product")} not shown)` : "";
  $("place").textContent = `step ${Math.min(chosen.step, products.length)} of ${products.length}${unseen}`;
  const lines = [...$("ledger").querySelectorAll("tbody tr")];
  lines.forEach((line, i) => {
    line.classList.toggle("done", i < chosen.step);
    line.classList.toggle("now", i === chosen.step - 1 && !whole());
  });
  const line = lines[Math.max(chosen.step - 1, 0)];
  if (line) $("ledger").scrollTop = whole() ? 0 : line.offsetTop - $("ledger").clientHeight / 2;
}

function drawLedger() {
  const { operands: [first, second] } = direction();
  const line = (...texts) => element("tr", "", ...texts.map((text) => element("td", "", text)));
  const lines = products.map((one) => line(
    `${nameOf(first, one.k, one.c, one.first)} · ${nameOf(second, one.k, one.c, one.second)}`,
    `${long(one.values[0])} · ${long(one.values[1])}`, long(one.product), long(one.sum)));
  if (rest) lines.push(line(`${plural(rest.count, "product")} not shown`, "", long(rest.sum), long(rest.total)));
  const head = ["product", "values", "equals", "running sum"]
    .map((text) => attributed(element("th", "", text), { scope: "col" }));
  $("ledger").replaceChildren(element("table", "",
    element("thead", "", element("tr", "", ...head)), element("tbody", "", ...lines)));
}

// -- updates ---------------------------------------------------------------------------------------

function update() {
  const { k, c } = shown();
  const one = whole() ? null : now();
  markChannels(k, c);
  unknown = new Set();
  panels.forEach((panel, i) => {
    const start = one ?? products.find((each) => each.k === k && each.c === c);
    const seen = one ? null : look[panel.tensor];
    const where = i === 2 ? at() : seen ?? start?.[i === 0 ? "first" : "second"] ?? [];
    panel.fill(k, c, where);
    panel.mark(at(), one);
  });
  $("step").value = chosen.step;
  $("step").setAttribute("aria-valuetext", $("place").textContent);
  tell();
}

// Draws the grids again if they do not show the chosen element.
function arrange() {
  const next = layout();
  if (holds(drawn, next)) return;
  drawn = next;
  const focused = panels.findIndex((panel) => panel.grid.contains(document.activeElement));
  drawChannels();
  panels = [0, 1, 2].map((index) => new Panel(index));
  $("planes").replaceChildren(...panels.map((panel, i) => i
    ? element("div", "operand", element("span", "sign", i === 1 ? "∗" : "→"), panel.element) : panel.element));
  $("key-pale").hidden = !drawn.planes[0].some((places) => places.some((one) => one === PAD || one === ZERO));
  $("key-zero").hidden = !drawn.planes[0].some((places) => places.includes(ZERO));
  return focused;
}

function show() {
  $("empty").hidden = scene.problem.N > 0;
  $("drawing").hidden = !scene.problem.N;
  const focused = arrange();
  gather();
  $("step").max = steps();
  drawLedger();
  update();
  if (focused === 2) panels[2].focus(at());
  const image = scene.problem.N > 1 ? `Image ${chosen.image} of ${scene.problem.N.toLocaleString("en")}.` : "";
  $("images").hidden = scene.problem.N < 2;
  $("image").value = chosen.image;
  $("image").max = scene.problem.N - 1;
  $("image-count").textContent = `of ${scene.problem.N.toLocaleString("en")}` +
    (direction().over === "image" ? ": dw sums over all images; the list has the products of this image." : ".");
  $("source").textContent = `${scene.source ? `Values: ${scene.source}. ` : ""}${image}`;
  const element_ = scene.problem.N && `${called(chosen.tensor)}=${indexOf(chosen.tensor, chosen.k, chosen.c, at()).join()}`;
  address(story ? `#story=${story.name},${story.place + 1}`
    : `#${[isTurned() && layerAddress(), element_].filter(Boolean).join("&")}`);
  showKnobs();
}

function address(text) {
  try {
    history.replaceState(null, "", text);
  } catch { /* the frame of a notebook has no address */ }
}

// Adds a sentence to the notice.
function notify(text) {
  $("notice").textContent += `${$("notice").hidden ? "" : " "}${text}`;
  $("notice").hidden = false;
}

function quiet() {
  $("notice").textContent = "";
  $("notice").hidden = true;
}

function choose(position) {
  stop();
  chosen.at[chosen.tensor] = position;
  look = {};
  show();
}

// Marks the terms of the element of the result that is under the mouse.
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
  $("told").setAttribute("aria-live", "off"); // do not read out every product
  const pause = Math.max(60, Math.min(700, 12000 / steps()));
  const tick = () => {
    stepTo(chosen.step + 1);
    if (chosen.step >= steps()) stop();
  };
  timer = setInterval(tick, pause);
  tick();
}

// Returns the operands and the result of a pass, such as "x, w → y".
function flowOf(tensor) {
  const [first, second] = scene.directions[tensor].operands.map(called);
  return `${first}, ${second} → ${called(tensor)}`;
}

function turnTo(tensor, looked = {}) {
  stop();
  chosen.tensor = tensor;
  look = looked;
  drawn = null;
  const { title, operands: [first, second], rule, note } = direction();
  document.querySelector(`input[value="${tensor}"]`).checked = true;
  $("channels-title").textContent = title;
  $("rule").textContent = `${rule}. ${note}`;
  $("name-first").textContent = `of ${called(first)}`;
  $("name-second").textContent = `of ${called(second)}`;
  $("name-result").textContent = called(tensor);
  const result = direction().terms > 1 ? `a summand of ${called(tensor)}` : called(tensor);
  $("planes-title").textContent = `The planes of one pair: ${called(first)}, ${called(second)} → ${result}`;
  show();
}

// Shows what the address says, whatever the page showed before: #dw=2,1,0,0 chooses an element of a
// result, #x=0,1,2,3 shows an element of an operand.
function fromAddress() {
  const { hash } = location;
  quiet();
  closeStory();
  showFirst();
  if (hash.length < 2 || storyFromAddress(hash)) return;
  const parts = [...new URLSearchParams(hash.slice(1).replaceAll("+", "%2B"))];
  const take = (...names) => { // removes the first part with one of the names
    const place = parts.findIndex(([name]) => names.includes(name));
    return place < 0 ? [] : parts.splice(place, 1)[0];
  };
  const isLayer = !original.noKnobs && parts.some(([name]) => Object.hasOwn(PARTS, name));
  if (isLayer && !showLayerOf((name) => take(name)[1] ?? null)) return;
  const [name, indices] = take(...TENSORS);
  if (name && !wrong) {
    const [index, sizes] = [indices.split(","), sizesOf(called(name))];
    if (index.length === sizes.length && index.every((one, i) => /^\d+$/.test(one) && +one < sizes[i]))
      visit(called(name), index.map(Number));
    else notify(`${name}[${indices}] is not an element: ${name} is ${sizes.join("x")}, indices count from 0.`);
  }
  if (parts.length) notify(`The page does not use ${parts.map((part) => `"${part.join("=")}"`).join(", ")} in the address.`);
  if (!name && !isLayer) notify(`Write, for example, #dw=${sizesOf("dw").fill(0).join()}.`);
}

// Shows the first layer with the element that it opens with.
function showFirst() {
  const { opened: tensor, image, k, c } = original;
  Object.assign(chosen, { tensor, image, k, c, at: {} });
  if (!original.noKnobs) turn(knobsOf(original.knobs));
  else {
    load(original);
    turnTo(tensor);
  }
}

// Chooses an image, whose values are shown if the page has them.
function chooseImage(image) {
  if (scene.data && image !== scene.image) load(sceneOf(scene.knobs, image));
  chosen.image = image;
}

function visit(tensor, [a, b, ...position]) {
  const { groupFilters, groupChannels } = scene.problem;
  if (isFilter(tensor)) {
    chosen.k = a;
    chosen.c = Math.floor(a / groupFilters) * groupChannels + b;
  } else {
    chooseImage(a);
    if (tensor.endsWith("x")) chosen.c = b;
    else chosen.k = b;
    if (meet(chosen.k, chosen.c)); // keep the other channel
    else if (tensor.endsWith("x")) chosen.k = Math.floor(b / groupChannels) * groupFilters;
    else chosen.c = Math.floor(b / groupFilters) * groupChannels;
  }
  if (scene.directions[tensor]) {
    chosen.at[tensor] = position;
    turnTo(tensor);
    return;
  }
  const isShown = direction().operands.includes(tensor);
  turnTo(isShown ? chosen.tensor : tensor === "w" ? "y" : "dw", { [tensor]: position });
  panels[direction().operands.indexOf(tensor)].focus(position);
}

for (const tensor of Object.keys(scene.directions)) {
  const radio = attributed(element("input"), { type: "radio", name: "direction", value: tensor });
  radio.addEventListener("change", () => turnTo(tensor));
  $("directions").append(element("label", "", radio, element("span", "", flowOf(tensor))));
}
$("first").addEventListener("click", () => { stop(); stepTo(0); });
$("back").addEventListener("click", () => { stop(); stepTo(chosen.step - 1); });
$("next").addEventListener("click", () => { stop(); stepTo(whole() ? 1 : chosen.step + 1); });
$("last").addEventListener("click", () => { stop(); stepTo(steps()); });
$("play").addEventListener("click", play);
$("step").addEventListener("input", (event) => { stop(); stepTo(+event.target.value); });
$("counts").addEventListener("change", update);
$("image").addEventListener("change", (event) => {
  const image = Math.trunc(Math.max(0, Math.min(+event.target.value || 0, scene.problem.N - 1)));
  if (event.target.value !== String(image)) notify(`The images are 0 to ${scene.problem.N - 1}.`);
  chooseImage(image);
  turnTo(chosen.tensor);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { stop(); stepTo(steps()); }
});
addEventListener("hashchange", fromAddress);
// A notice vanishes at the next action: a changed field, or a pressed button.  The click event of a
// pointer does not hide the notice: between pointerdown and click, a field may have lost the focus and
// shown a notice on its change.  A change in #hand does not hide it: Enter has read the field already.
addEventListener("change", (event) => event.target.closest("#hand") || quiet(), true);
addEventListener("pointerdown", (event) => event.target.closest("button") && quiet(), true);
addEventListener("click", (event) => !event.detail && event.target.closest("button") && quiet(), true);

// Folds the text of a framed page, and tells the other page the height of its content.
function fitFrame() {
  for (const part of document.querySelectorAll("details.made")) part.open = false;
  const tell_ = () => parent.postMessage({ cupyconvHeight: Math.ceil(document.body.getBoundingClientRect().height) }, "*");
  new ResizeObserver(tell_).observe(document.body);
}

function start() {
  $("live").hidden = false;
  buildKnobs();
  buildStories();
  fromAddress();
  if (FRAMED) fitFrame();
  document.documentElement.dataset.ready = "true";
}
