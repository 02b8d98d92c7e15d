// Knobs: controls for the sizes, stride, padding and values of a layer.  Each turn makes a new scene
// with scenes.js, or shows the broken rule and its fixes.  The address of the page contains the layer.
const MOST = { images: 16, channels: 512, filters: 512, groups: 512,
  input: 1000, filter: 64, stride: 64, dilation: 64, before: 64, after: 64, extra: 63 };
const LEAST = { images: 0, before: 0, after: 0, extra: 0 }; // of other knobs, 1
const MOST_STEPS = 99; // largest change of a knob that repairs a layer
const TRANSPOSED = Object.assign(new Names(), { x: "the result", y: "x" });
const ROWS = { input: "input", filter: "filter", stride: "stride", dilation: "dilation",
  before: "padding before", after: "padding after", ...(original.isTransposed ? { extra: "output_padding" } : {}) };
const COUNTS = original.isTransposed
  ? { images: "images", filters: "channels of x", channels: "channels of y", groups: "groups" }
  : { images: "images", channels: "channels of x", filters: "filters", groups: "groups" };
const MODES = { valid: "valid", same: "same", same_lower: "same_lower" };
const VALUES = { normal: "random", integers: "integers",
  [called("x")]: "x one hot", w: "w one hot", [called("dy")]: "dy one hot" };
const LOSSES = { dot: "sum(dy · y)", sum: "sum(y)", squares: "sum(y²) / 2" };
const isSeed = (text) => /^\d{1,19}$/.test(text) && BigInt(text) < 2n ** 63n;
const MOST_CELLS = innerWidth < 600 ? 12 : 19; // largest number of positions in the picture of an axis
const MOST_WINDOWS = 8; // largest number of windows in the picture of an axis

let knobs = {}; // the state of the knobs
let wrong = null; // the error of the state
let built = ""; // number of axes and padding mode for which the knobs are built
let lastValid = null; // the last state without an error
let plain = null; // the first layer and its values, in the notation of the knobs
let pictured = null; // the scene whose layer is shown

const isTurned = () => scene.knobs !== original.knobs;

// Returns the state of the knobs for a layer, whose arguments may be invalid.
function knobsOf({ layer, ...rest }) {
  return stateOf({ layer: original.isTransposed ? ownOf(layer) : layer, ...rest });
}

// A transposed layer has its own arguments: those of ConvProblem.from_output, with the shape of the
// layer's x as input_shape.  Returns them for the convolution that the layer reverses.
function ownOf(layer) {
  const { output_shape, axes } = rules.problem(layer);
  const output_padding = rules.compact(axes.map((axis) => axis.input - axis.first_input_size_for(axis.output)));
  return { ...layer, input_shape: output_shape, output_padding };
}

// Returns the ConvAxis of a column of the knobs, for the convolution that a transposed layer reverses.
function reversed({ filter, stride, dilation, before, after }, name, mode) {
  const pads = mode === "numbers" ? [before, after] : [0, 0];
  return new ConvAxis(name, 0, filter, stride, dilation, ...pads, mode);
}

// Returns the state of the knobs for a layer's own arguments.
function stateOf({ layer, values, seed, loss = "dot", edits = {} }) {
  const rank = layer.input_shape.length - 2;
  const letters = rules.LETTERS[rank];
  const [data, filter] = rules.formatsOf(layer, rank);
  let [images, channels, ...inputs] = rules.ordered(layer.input_shape, data, `NC${letters}`);
  const [filters, depth, ...taps] = rules.ordered(layer.filter_shape, filter, `OI${letters}`);
  const isWord = typeof layer.padding === "string";
  const pairs = rules.each(isWord ? 0 : layer.padding ?? 0, rank).map((one) => rules.each(one, 2));
  const [strides, dilations, extras] = [layer.stride ?? 1, layer.dilation ?? 1, layer.output_padding ?? 0]
    .map((one) => rules.each(one, rank));
  const groups = layer.groups ?? 1;
  const axes = inputs.map((input, i) => ({ input, filter: taps[i], stride: strides[i],
    dilation: dilations[i], before: pairs[i][0], after: pairs[i][1], extra: extras[i] }));
  if (original.isTransposed) channels = depth * groups; // the channels of x are those of the filter's axis O
  return { rank, images, channels, filters, groups, depth: depth === channels / groups ? null : depth, axes,
    mode: isWord ? layer.padding.toLowerCase() : "numbers", data, filter, values, seed: String(seed), loss, edits };
}

// Returns the layer's own arguments for a state of the knobs.
function ownLayerOf(state) {
  if (!original.isTransposed) return layerOf(state);
  const { images, filters, axes, data, rank } = state;
  const sizes = { N: images, C: filters };
  const input_shape = [...data].map((letter) => sizes[letter] ?? axes[rules.LETTERS[rank].indexOf(letter)].input);
  return { ...layerOf(state), input_shape, output_padding: rules.compact(axes.map((axis) => axis.extra)) };
}

// Returns ConvProblem's arguments for a state of the knobs.
function layerOf(state) {
  const { rank, images, channels, filters, groups, axes, mode, data, filter } = state;
  const depth = state.depth ?? Math.max(Math.floor(channels / Math.max(groups, 1)), 1);
  const sizes = { N: images, C: channels, O: filters, I: depth };
  const sizeOf = (axis, key) => key === "input" && original.isTransposed
    ? reversed(axis, "", mode).first_input_size_for(axis.input) + axis.extra : axis[key];
  const shape = (format, key) => [...format].map((letter) =>
    sizes[letter] ?? sizeOf(axes[rules.LETTERS[rank].indexOf(letter)], key));
  const all = (key) => rules.compact(axes.map((axis) => axis[key]));
  return { input_shape: shape(data, "input"), filter_shape: shape(filter, "filter"), stride: all("stride"),
    padding: mode === "numbers" ? scenes.paddingOf(axes.map(({ before, after }) => [before, after])) : mode, dilation: all("dilation"), groups,
    data_format: data, filter_format: filter };
}

// Changes the knobs, and draws the layer if it is valid.
function turn(state) {
  stop();
  knobs = state;
  const { values, seed, loss, edits } = state;
  const asked = { layer: layerOf(state), values, seed, loss, edits };
  wrong = null;
  try {
    const problem = problemOf(state);
    const [set, gone] = [[], []];
    const fits = (name) => tensors.isElement(problem, name) && (loss === "dot" || !name.startsWith(called("dy")));
    for (const one of Object.entries(edits)) (fits(one[0]) ? set : gone).push(one);
    asked.edits = knobs.edits = Object.fromEntries(set);
    const isFixed = loss !== "dot" && gone.some(([name]) => tensors.isElement(problem, name));
    if (gone.length) notify(`Not set: ${gone.map(([name]) => scenes.renamed(name, called)).join(", ")}. ` + (isFixed
      ? "The loss determines dy." : `The layer does not have ${gone.length === 1 ? "this element" : "these elements"}.`));
    const isFirst = rules.same(asked, plain);
    const image = Math.max(0, Math.min(chosen.image, problem.N - 1));
    if (!isFirst && !isTurned() && original.knobs.given.length)
      notify(`The values of ${original.knobs.given.map(called).join(", ")} that were passed belong to the first layer. ` +
        "The knobs use the values that they name.");
    load(isFirst ? sceneOf(original.knobs, original.computes ? image : original.image) : sceneOf(asked, image));
    chosen.image = image;
  } catch (error) {
    if (!(error instanceof ConvError)) throw error;
    wrong = error;
  }
  if (!wrong) lastValid = knobs;
  buildDials();
  showWrong();
  if (wrong) address(`#${layerAddress()}`);
  else turnTo(chosen.tensor);
}

// Returns the problem of a state of the knobs.  Throws a ConvError.
function problemOf(state) {
  const { axes, rank, mode } = state;
  if (original.isTransposed)
    for (const [i, axis] of axes.entries())
      if (Math.min(axis.input, axis.stride, axis.dilation) > 0)
        _result_size(TRANSPOSED, reversed(axis, rules.LETTERS[rank][i], mode), axis.input, axis.extra);
  return rules.problem(layerOf(state));
}

function showWrong() {
  for (const id of ["drawing", "empty", "answer", "copies"]) $(id).hidden = Boolean(wrong);
  $("wrong").hidden = !wrong;
  if (!wrong) return;
  pictured = null;
  showTitle([ownLayerOf(knobs).input_shape, ownLayerOf(knobs).filter_shape].map(shape_text).join(" * "));
  const where = wrong.axis ? ` (axis ${wrong.axis})` : "";
  const told = element("p", "", `${wrong.rule[0].toUpperCase()}${wrong.rule.slice(1)}${where}: ${wrong.values}.`);
  const way = (text, state) => buttonOf("way", () => {
    turn(state());
    $("dials").querySelector("input").focus();
  }, {}, text);
  const ways = repairs().map(([text, state]) => way(text, () => state));
  if (!ways.length) ways.push(way("Go back to the last valid layer", () => lastValid ?? knobsOf(original.knobs)));
  $("wrong").replaceChildren(told, element("p", "", wrong.remedy && `${wrong.remedy}.`), ...ways);
}

// Returns the states, with their texts, in which knobs of one kind have the nearest values that make the layer valid.
function repairs() {
  const letters = [...rules.LETTERS[knobs.rank]];
  const errorOf = (state) => {
    try {
      return problemOf(state) && null;
    } catch (error) {
      return error;
    }
  };
  const kindOf = ({ axis, rule, values }) => `${axis} ${rule} ${values}`.replace(/-?\d+/g, "");
  const valuesOf = (state, key) => key in ROWS ? state.axes.map((axis) => axis[key]) : state[key];
  const wasTurned = ([key]) => lastValid && !rules.same(valuesOf(knobs, key), valuesOf(lastValid, key));
  const kinds = Object.entries({ ...COUNTS, depth: "channels of a filter", ...ROWS });
  kinds.sort((a, b) => wasTurned(b) - wasTurned(a)); // repair the turned knob first
  return kinds.map(([key, name]) => {
    const least = LEAST[key] ?? 1;
    const at = (state, i) => [valuesOf(state, key)].flat()[i];
    // Returns the state with the nearest value of a knob that makes the layer valid; without one, with the
    // nearest value that leads to another error.
    const next = (state, kind, i) => {
      let other = null;
      for (let step = 1; step <= MOST_STEPS; step++)
        for (const value of [at(state, i) - step, at(state, i) + step].map((one) => Math.max(one, least))) {
          const made = key in ROWS ? withAxis(i, { [key]: value }, state) : { ...state, [key]: value };
          const error = errorOf(made);
          if (!error) return made;
          if (kindOf(error) !== kind) other ??= made;
        }
      return other;
    };
    let [state, error] = [knobs, wrong];
    for (let tries = 0; error && state && tries < 6; tries++) {
      const places = !(key in ROWS) ? [0] : letters.map((_, i) => i).filter((i) => [letters[i], null].includes(error.axis));
      state = places.map((i) => next(state, kindOf(error), i)).find(Boolean);
      error = state && errorOf(state);
    }
    if (error || !state) return null;
    const changed = (key in ROWS ? letters : [""]).map((letter, i) => [`${name} ${letter}`.trim(), at(state, i), at(knobs, i)]);
    const texts = changed.filter(([, now, before]) => now !== before).map(([label, now]) => `${label} = ${now}`);
    return [`Use ${texts.join(" and ")}`, state];
  }).filter(Boolean);
}

// -- the controls ----------------------------------------------------------------------------------

// Returns a number field between two buttons.
function dial(label, key, read, write) {
  const box = element("span", "dial");
  const field = attributed(element("input"),
    { type: "number", inputmode: "numeric", step: 1, max: MOST[key], "aria-label": label });
  const least = LEAST[key] ?? 1;
  const set = (value) => {
    const most = MOST[key].toLocaleString("en");
    if (!Number.isInteger(value)) notify(`The knob "${label}" needs a whole number.`);
    else turn(write(Math.max(Math.min(value, MOST[key]), -MOST[key])));
    if (value > MOST[key]) notify(`The knob "${label}" goes up to ${most}.`);
    if (value < -MOST[key]) notify(`The knob "${label}" goes down to -${most}.`);
    box.refresh();
  };
  const button = (text, word, step) =>
    buttonOf("", () => set(Math.max(read() + step, least)), { "aria-label": `${label}: ${word}` }, text);
  field.addEventListener("change", () => set(field.valueAsNumber));
  box.append(button("−", "less", -1), field, button("+", "more", 1));
  box.refresh = () => (field.value = read());
  return box;
}

function choice(label, words, read, write) {
  const options = Object.entries(words).map(([word, text]) =>
    attributed(element("option", "", text), { value: word }));
  const select = attributed(element("select", "", ...options), { "aria-label": label });
  const box = element("label", "choice", element("span", "", label), select);
  select.addEventListener("change", () => {
    const before = knobs;
    turn(write(select.value));
    if (label === "values" && knobs.loss !== before.loss)
      notify(`The loss is ${LOSSES.dot} again, because the other losses determine dy.`);
    if (label === "loss" && knobs.values !== before.values)
      notify("The values are integers, because the loss determines dy.");
  });
  box.refresh = () => (select.value = read());
  return box;
}

const withAxis = (i, change, state = knobs) =>
  ({ ...state, axes: state.axes.map((axis, place) => (place === i ? { ...axis, ...change } : axis)) });

// Returns the state with another number of axes; the first axis is repeated, or the first
// axes are dropped.
function withRank(rank) {
  const axes = rules.span(rank).map((i) => ({ ...knobs.axes[Math.max(i - rank + knobs.rank, 0)] }));
  const isLast = knobs.data.endsWith("C");
  const form = rules.filterFormats(knobs.rank).indexOf(knobs.filter);
  return { ...knobs, rank, axes, data: rules.dataFormats(rank)[+isLast], filter: rules.filterFormats(rank)[form] };
}

function buildDials() {
  const form = `${knobs.rank} ${knobs.mode}`;
  if (form !== built) {
    built = form;
    const letters = [...rules.LETTERS[knobs.rank]];
    const heading = (text, scope) => attributed(element("th", "", text), { scope });
    const head = element("tr", "", element("td"), ...letters.map((letter) => heading(`axis ${letter}`, "col")));
    const rows = Object.entries(ROWS).filter(([, name]) => knobs.mode === "numbers" || !name.startsWith("padding"));
    const lines = rows.map(([key, name]) => element("tr", "", heading(name, "row"), ...letters.map((letter, i) =>
      element("td", "", dial(`${name} ${letter}`, key, () => knobs.axes[i][key],
        (value) => withAxis(i, { [key]: value }))))));
    const counts = element("div", "counts", ...Object.entries(COUNTS).map(([key, name]) =>
      element("div", "", element("span", "", name), dial(name, key, () => knobs[key],
        (value) => ({ ...knobs, [key]: value, depth: key === "images" ? knobs.depth : null })))),
      choice("padding", { numbers: "numbers", ...MODES }, () => knobs.mode, (mode) => ({ ...knobs, mode })),
      choice("values", VALUES, () => knobs.values,
        (values) => ({ ...knobs, values, loss: values === called("dy") ? "dot" : knobs.loss })),
      choice("loss", LOSSES, () => knobs.loss,
        (loss) => ({ ...knobs, loss, values: knobs.values === called("dy") && loss !== "dot" ? "integers" : knobs.values })),
      choice("axes", { 1: "1-D", 2: "2-D", 3: "3-D" }, () => String(knobs.rank), (rank) => withRank(+rank)),
      choice("data format", { first: "channels first", last: "channels last" },
        () => (knobs.data.endsWith("C") ? "last" : "first"), (word) => ({ ...knobs,
          data: rules.dataFormats(knobs.rank)[+(word === "last")],
          filter: rules.filterFormats(knobs.rank)[+(word === "last")] })),
      seedField());
    const focused = $("dials").contains(document.activeElement) && document.activeElement.ariaLabel;
    $("dials").replaceChildren(element("table", "", head, ...lines), counts);
    if (focused) [...$("dials").querySelectorAll("input,select")].find((one) => one.ariaLabel === focused)?.focus();
  }
  for (const one of $("dials").querySelectorAll(".dial,.choice")) one.refresh();
}

function seedField() {
  const field = attributed(element("input"), { type: "text", inputmode: "numeric", size: 5 });
  const box = element("label", "choice", element("span", "", "seed"), field);
  field.addEventListener("change", () => {
    if (isSeed(field.value)) turn({ ...knobs, seed: String(BigInt(field.value)) });
    else {
      notify(`A seed is a whole number from 0 to 2^63 - 1, not "${field.value}".`);
      field.value = knobs.seed;
    }
  });
  box.refresh = () => (field.value = knobs.seed);
  return box;
}

// -- values by hand -------------------------------------------------------------------------------

// Sets the element of x, w or dy whose name and value are in the fields.
function setByHand() {
  quiet();
  const name = scenes.renamed($("hand-name").value.replaceAll(/\s/g, ""), called);
  const value = $("hand-value").valueAsNumber;
  if (tensors.isElement(scene.problem, name) && tensors.isNumber(value)) {
    turn({ ...knobs, edits: { ...knobs.edits, [name]: value } });
    return;
  }
  const [x, w, dy] = ["x", "w", "dy"].map((tensor) => shape_text(sizesOf(called(tensor))));
  notify(`Set an element to a number, for example x[${sizesOf("x").map(() => 0)}] to 2. ` +
    `Indices count from 0; x is ${x}, w is ${w} and dy is ${dy}. Numbers are float32, at most 3.4e38 in size.`);
  $("notice").scrollIntoView({ block: "nearest" });
}

function buildHand() {
  $("hand-set").addEventListener("click", setByHand);
  $("hand").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("input")) setByHand();
  });
  $("hand-undo").addEventListener("click", () => turn({ ...knobs, edits: {} }));
}

// -- what follows from the layer -------------------------------------------------------------------

// Returns the first and the last input size with the output size of an axis.
const inputsOf = ({ valid_input_sizes: sizes }) => [sizes.at(0), sizes.at(-1)];

// Returns sentences on an axis: its formula, padding, input sizes and unread inputs.
// PyTorch pads both sides of all axes equally; otherwise, all axes are padded and cropped.
function factsOf(axis, isUneven) {
  const { pad_before: before, pad_after: after, padding_mode: mode, stride } = axis;
  const [unread, inputs] = [rules.unread(axis), inputsOf(axis)];
  if (original.isTransposed) return transposedFactsOf(axis);
  const pads = mode.startsWith("same")
    ? `SAME pads by ${before} before and ${after} after`
    : `the padding is ${before} before and ${after} after`;
  const others = inputs[0] === inputs[1]
    ? `no other input size gives output size ${axis.output}`
    : inputs[1] - inputs[0] === 1 ? `input sizes ${inputs.join(" and ")} both give output size ${axis.output}`
    : `input sizes ${inputs.join(" to ")} all give output size ${axis.output}`;
  const stepped = stride === 1 ? ""
    : !isUneven ? `; PyTorch computes dx with output_padding=${output_padding(axis)}`
    : `; PyTorch pads both sides by the same number, so compute dx with padding=0 and output_padding=${output_padding(axis)}, ` +
      `and remove ${before} before and ${after} after`;
  const skipped = unread.length
    ? ` No window reads ${unread.length === 1 ? "input" : "inputs"} ${runsOf(unread)}: ` +
      `${unread.length === 1 ? "its" : "their"} gradient is 0.` : "";
  if (story?.view.startsWith("windows")) return `output ${axis.formula}; ${pads}.`;
  return `output ${axis.formula}; ${pads}; ${others}${stepped}.${skipped}`;
}

// Returns sentences on an axis of a transposed layer: its size, padding, other sizes and unreached outputs.
function transposedFactsOf(axis) {
  const { input, output, pad_before: before, pad_after: after, padding_mode: mode, stride, effective_filter: span } = axis;
  const [unread, inputs, firstInput] = [rules.unread(axis), inputsOf(axis), axis.first_input_size_for(axis.output)];
  const full = `(${output} - 1)*${stride} + ${mode.startsWith("same") ? 1 : span}`;
  const pads = mode.startsWith("same") || !(before + after) ? "" : ` - ${before + after}`;
  const last = inputs[1] - firstInput;
  const extras = inputs[0] === inputs[1] ? "only this size is possible"
    : `output_padding ${inputs[0] - firstInput} to ${last} gives sizes ${inputs.join(" to ")}`;
  const unreached = unread.length
    ? ` No input reaches ${unread.length === 1 ? "output" : "outputs"} ${runsOf(unread)}: y is the bias there.` : "";
  return `output ${full}${pads} + output_padding ${input - firstInput} = ${input}; the padding crops ${before} before ` +
    `and ${after} after; ${extras}.${unreached}`;
}

// Returns numbers as "0, 2, 4", or shorter if there are many.
const runsOf = (numbers) => numbers.length <= 8 ? numbers.join(", ")
  : `${numbers.slice(0, 4).join(", ")}, … ${numbers.at(-1)} (${numbers.length} in all)`;

function showLayer() {
  const { problem, knobs: { layer } } = scene;
  const text = shape_text;
  // A transposed layer exchanges x and y of the convolution that it reverses.
  const sides = [[layer.input_shape, problem.C], [problem.output_shape, problem.K]];
  const convolution = [sides[0][0], layer.filter_shape].map(text).join(" * ") + ` -> ${text(problem.output_shape)}`;
  const [[x], [y, biases]] = original.isTransposed ? sides.reverse() : sides;
  showTitle(isTurned()
    ? `${original.isTransposed ? "transposed layer: " : ""}${text(x)} * ${text(layer.filter_shape)} -> ${text(y)}` : "");
  if (original.isTransposed)
    $("equivalent").textContent = `The layer computes the input gradient of the convolution ${convolution}.`;
  const shapes = [["y, dy", y, problem.data_format], ["x, dx", x, problem.data_format],
    ["w, dw", layer.filter_shape, problem.filter_format], ["db", [biases], ""]];
  $("shapes").replaceChildren(...shapes.map(([names, shape, order]) => element("span", "shape",
    element("b", "", names), ` ${text(shape)}`, element("small", "", order && ` ${order}`))));
  const alike = {}; // axes that differ only in name
  for (const axis of problem.axes) (alike[JSON.stringify({ ...axis, name: "" })] ??= []).push(axis);
  $("facts").replaceChildren(...Object.values(alike).map((axes) => {
    const names = axes.map((axis) => axis.name).join(", ").replace(/, (.)$/, " and $1");
    return element("div", "", element("p", "", element("b", "", `${names}: `), factsOf(axes[0], problem.isUneven)), strip(axes[0], names));
  }));
}

// Shows the title of turned knobs; if it is empty, the title, text and programs of the first layer.
function showTitle(turned) {
  document.querySelector("h1").textContent = turned || originalTitle;
  document.title = `${turned || originalTitle} - cupyconv explain`;
  for (const part of document.querySelectorAll(".made")) part.hidden = Boolean(turned);
  $("reset").hidden = !turned;
  $("stale").hidden = !turned;
}

// Returns the picture of an axis: its padded input, each window with its taps, and the possible
// sizes of dx as parts of the gradient of the padded input.
function strip(axis, name) {
  const crops = axis.valid_input_sizes.length === 1 || story?.view.startsWith("windows") ? [] : possible(axis).map((size) => axis.of_input(size));
  const end = (one) => one.pad_before + one.input;
  const cells = Math.min(Math.max(axis.padded_input, ...crops.map(end)), MOST_CELLS);
  const padded = Math.min(axis.padded_input, cells);
  const unread = new Set(rules.unread(axis));
  const hidden = axis.padded_input - padded;
  const shown = rules.span(axis.output).filter((o) => o * axis.stride + axis.effective_filter <= cells);
  const windows = shown.length <= MOST_WINDOWS ? shown : shown.slice(0, MOST_WINDOWS - 2);
  if (windows.length < axis.output) windows.push(null);
  if (!hidden && shown.length > MOST_WINDOWS) windows.push(shown.at(-1));
  const [size, high] = [22, 15];
  const picture = inSvg("svg", { width: cells * size + 66,
    height: size + 8 + (windows.length + crops.length) * high, role: "img", class: "strip" });
  const drawnWindows = windows.filter((o) => o !== null).length;
  const cuts = [];
  if (hidden) cuts.push(`${padded} of ${plural(axis.padded_input, "position")}`);
  if (drawnWindows < axis.output) cuts.push(`${drawnWindows} of ${plural(axis.output, "window")}`);
  const cut = cuts.length ? ` Drawn: ${cuts.join(", ")}.` : "";
  const label = original.isTransposed
    ? `Axis ${name}: output ${axis.input}, ${axis.padded_input} with the cropped positions, and the copies of the filter.${cut}`
    : `Axis ${name}: input ${axis.input}, padded to ${axis.padded_input}, and its windows.${cut}`;
  picture.setAttribute("aria-label", label);
  const write = (x, y, text) => picture.append(inSvg("text", { x, y }, text));
  for (let i = 0; i < padded; i++) {
    const at = i - axis.pad_before;
    const isPad = at < 0 || at >= axis.input;
    const kind = isPad ? "padded" : unread.has(at) ? "unread" : "read";
    picture.append(inSvg("rect", { x: i * size + 1, y: 1, width: size - 1, height: size - 1, class: kind }));
    if (!isPad) write(i * size + 1 + size / 2, size - 6, at);
  }
  if (hidden) write(cells * size + 14, size - 6, "…");
  windows.forEach((o, line) => {
    const y = size + 8 + line * high;
    if (o === null) {
      write(size, y + 8, "…");
      return;
    }
    const first = o * axis.stride;
    picture.append(inSvg("line", { x1: first * size + 4, x2: (first + axis.effective_filter) * size - 3, y1: y + 4, y2: y + 4 }));
    for (let r = 0; r < axis.filter; r++) {
      const x = (first + r * axis.dilation) * size + 5;
      picture.append(inSvg("rect", { x, y: y - 1, width: size - 9, height: 11, class: "tap" }),
        inSvg("text", { x: x + (size - 9) / 2, y: y + 8, class: "tap" }, r));
    }
    write((first + axis.effective_filter) * size + 12, y + 8, o);
  });
  const full = (axis.output - 1) * axis.stride + axis.effective_filter;
  crops.forEach((one, line) => {
    const y = size + 8 + (windows.length + line) * high;
    const bar = (from, to, kind) => to > from && picture.append(
      inSvg("rect", { x: from * size + 3, y, width: (to - from) * size - 5, height: 10, class: kind }));
    const [from, to] = [one.pad_before, end(one)].map((place) => Math.min(place, cells));
    bar(from, Math.min(to, full), one.input === axis.input ? "crop own" : "crop");
    bar(Math.max(from, full), to, "crop beyond");
    write(to * size + 32, y + 9, `${end(one) > cells ? "… " : ""}${called("dx")} ${one.input}`);
  });
  const words = original.isTransposed
    ? ["a copy of the filter, with the number of its input", "cropped", "not reached: y is the bias",
      "y of each possible size, a part of the sum of all copies", "copy"]
    : ["a window, with the number of its output", "padding", "not read",
      "dx of each possible size, a part of the gradient of the padded input", "window"];
  const [bar_, pad, grey, crop, last] = words;
  return element("figure", "axis", picture, element("figcaption", "", `Each bar with numbered taps is ${bar_}.` +
    `${axis.pad_before || axis.pad_after ? ` Dashed: ${pad}.` : ""}` +
    `${[...unread].some((at) => at + axis.pad_before < padded) ? ` Grey: ${grey}.` : ""}` +
    `${crops.length ? ` Bars without taps: ${crop}` +
      `${crops.some((one) => end(one) > full) && full < cells ? `, with zeros (dashed) after the last ${last}.` : "."}` : ""}${cut}`));
}

// Returns the input sizes with the same output: the first two, the axis's own, and the last two.
function possible(axis) {
  const [{ input }, [first, last]] = [axis, inputsOf(axis)];
  const sizes = [first, first + 1, input, last - 1, last].filter((one) => first <= one && one <= last);
  return [...new Set(sizes)].sort((a, b) => a - b);
}

function inSvg(tag, attributes, text = "") {
  const made = attributed(document.createElementNS($("blank").namespaceURI, tag), attributes);
  made.append(text);
  return made;
}

function showPrograms() {
  const name = scene.problem.N ? nameOf(chosen.tensor, chosen.k, chosen.c, at()) : "";
  $("programs").replaceChildren(...scenes.programs(scene, name).map(({ name: title, text, why }) => {
    if (why) return element("div", "program", element("h3", "", title), element("p", "soft", why));
    const code = attributed(element("pre", "", text), { tabindex: 0 });
    const button = buttonOf("", () => copy(code, button), { "aria-label": `Copy: ${title}` }, "Copy");
    return element("div", "program", element("h3", "", title), button, code);
  }));
}

async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch { // a frame without the permission
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

// Shows the layer, the bias gradient, the check and the programs of the scene and the chosen element.
function showKnobs() {
  const own = original.isTransposed ? chosen.c : chosen.k;
  $("bias").textContent = scene.data
    ? `db[${own}], the gradient of the bias, is the sum of dy[${own}]${scene.problem.N > 1 ? " over all images" : ""}: ` +
      `${long(tensors.sums(scene.problem, called("dy"), scene.data[called("dy")])[own])}.` : "";
  $("hand").hidden = !scene.data || Boolean(story);
  $("hand-undo").hidden = !Object.keys(knobs.edits ?? {}).length;
  $("check").textContent = story ? "" : differenceText();
  if (original.noKnobs) return;
  showPrograms();
  if (pictured === scene) return;
  pictured = scene;
  showLayer();
}

// -- the address -----------------------------------------------------------------------------------

// Returns the layer in the notation of the address, which resembles the options of the command line.
function layerAddress() {
  const layer = ownLayerOf(knobs);
  const words = [`input=${shape_text(layer.input_shape)}`, `filter=${shape_text(layer.filter_shape)}`];
  for (const [name, value] of scenes.changed(knobs.rank, layer)) words.push(`${name}=${rules.optionText(value)}`);
  if (layer.output_padding) words.push(`output_padding=${rules.optionText(layer.output_padding)}`);
  if (knobs.values !== "normal") words.push(`values=${isTensor(knobs.values) ? called(knobs.values) : knobs.values}`);
  if (knobs.seed !== "0") words.push(`seed=${knobs.seed}`);
  if (knobs.loss !== "dot") words.push(`loss=${knobs.loss}`);
  const set = Object.entries(knobs.edits).map(([name, value]) => `${scenes.renamed(name, called).replace("[", ":").replace("]", "")}:${value}`);
  if (set.length) words.push(`set=${set.join(";")}`);
  return words.join("&");
}

const isTensor = (values) => values === "x" || values === "w" || values === "dy"; // is one hot

// Parts of an address that hold a layer, with an example of each.
const PARTS = { input: "1x5x8x8, with 3 to 5 sizes of at most 1,000", filter: "10x5x3x3, with as many sizes as the input",
  stride: "2, or 2,1 for two axes", padding: "same, or 1, or 0:1,1:1 for both sides of two axes",
  dilation: "2, or 2,1 for two axes", groups: "2",
  ...(original.isTransposed ? { output_padding: "1, or 1,0 for two axes" } : {}), data_format: "NHWC", filter_format: "HWIO",
  values: "integers", seed: "7", loss: "sum, which determines dy", set: "x:0,1,2,3:5, an element and its float32 number" };

// Shows the layer of an address, or a notice on the first part that is not valid.  Returns whether
// all parts are valid.
//
// take: returns the text of a part and marks it as used; null if the address does not have it.
function showLayerOf(take) {
  try {
    turn(stateOf(readLayer(take)));
    return true;
  } catch (text) {
    if (typeof text !== "string") throw text;
    notify(text);
    return false;
  }
}

// Returns the layer of an address; throws a text on the first part that is not valid.
function readLayer(take) {
  const read = (name, usual, valid) => {
    const text = take(name);
    const value = text === null ? usual : valid(text);
    if (value !== undefined) return value;
    throw `${text === null ? `The address has no part "${name}".` : `"${name}=${text}" in the address is not valid.`} ` +
      `Write, for example, ${name}=${PARTS[name]}.`;
  };
  const numbers = (text, parts) => {
    const found = text.split(parts);
    return found.every((one) => /^-?\d+$/.test(one) && Math.abs(one) <= MOST.input) ? found.map(Number) : undefined;
  };
  const single = (list) => (list.length === 1 ? list[0] : list);
  const sizes = (text) => numbers(text, /[x,]/);
  const input = read("input", undefined, (text) => (sizes(text)?.length - 2 in rules.LETTERS ? sizes(text) : undefined));
  const rank = input.length - 2;
  const filter = read("filter", undefined, (text) => (sizes(text)?.length === rank + 2 ? sizes(text) : undefined));
  const each = (text) => {
    const list = numbers(text, ",");
    return list?.length === 1 || list?.length === rank ? single(list) : undefined;
  };
  const pads = (text) => {
    const sides = text.split(",").map((side) => numbers(side, ":"));
    if (Object.hasOwn(MODES, text.toLowerCase())) return text.toLowerCase();
    if (!sides.every((side) => side?.length <= 2)) return undefined;
    return sides.flat().length === 1 ? sides[0][0] : sides.length === rank ? sides.map(single) : undefined;
  };
  const word = (known) => (text) => (known.includes(text) ? text : undefined);
  const format = (known) => (text) => word(known)(text.toUpperCase());
  const edits = (text) => {
    const set = text.split(";").map((one) => one.split(":"));
    const isValid = ([name, index, value, ...rest]) => !rest.length && tensors.parsed(`${name}[${index}]`) &&
      /^-?\d+(\.\d*)?(e[-+]?\d+)?$/.test(value) && tensors.isNumber(Number(value));
    return set.every(isValid)
      ? Object.fromEntries(set.map(([name, index, value]) => [`${called(name)}[${index}]`, Number(value)]))
      : undefined;
  };
  const layer = { input_shape: input, filter_shape: filter, stride: read("stride", 1, each),
    padding: read("padding", 0, pads), dilation: read("dilation", 1, each),
    groups: read("groups", 1, (text) => (numbers(text, ",")?.length === 1 ? Number(text) : undefined)),
    data_format: read("data_format", null, format(rules.dataFormats(rank))),
    filter_format: read("filter_format", null, format(rules.filterFormats(rank))) };
  if (original.isTransposed) {
    layer.output_padding = read("output_padding", 0, each);
    const [data, format] = rules.formatsOf(layer, rank);
    const [channels, filters] = [input[data.indexOf("C")], filter[format.indexOf("O")]];
    if (channels !== filters)
      throw `A transposed layer has one filter for each channel of x: x has ${channels}, and there are ${filters} filters.`;
  }
  const loss = read("loss", "dot", word(Object.keys(LOSSES)));
  const word_ = read("values", "normal", word(Object.keys(VALUES)));
  const values = isTensor(word_) ? called(word_) : word_;
  if (word_ === "dy" && loss !== "dot")
    throw `"values=dy" and "loss=${loss}" in the address exclude each other, because this loss determines dy.`;
  return { layer, loss, values,
    seed: read("seed", "0", (text) => (isSeed(text) ? String(BigInt(text)) : undefined)), edits: read("set", {}, edits) };
}

// -- start -----------------------------------------------------------------------------------------

const originalTitle = document.querySelector("h1").textContent;

function buildKnobs() {
  if (original.noKnobs) {
    $("knobs").replaceChildren(element("p", "soft", original.noKnobs));
    return;
  }
  knobs = knobsOf(original.knobs);
  plain = { layer: layerOf(knobs), values: knobs.values, seed: knobs.seed, loss: "dot", edits: {} };
  $("turn").open = !NARROW && !FRAMED;
  if (original.dtype !== "float32") $("first-dtype").textContent = ` The first layer has ${original.dtype}; the knobs use float32.`;
  buildHand();
  $("reset").addEventListener("click", () => turn(knobsOf(original.knobs)));
  buildDials();
}
