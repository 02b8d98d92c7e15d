// The shape rules of a convolution as in cupyconv/problem.py, with the suggested fixes of
// cupyconv/remedies.py.  A layer is an object with ConvProblem's arguments as keys.
const rules = (() => {
  const LETTERS = { 1: "W", 2: "HW", 3: "DHW" };
  const span = (end) => Array.from({ length: Math.max(end, 0) }, (_, i) => i);
  const dataFormats = (rank) => [`NC${LETTERS[rank]}`, `N${LETTERS[rank]}C`];
  const filterFormats = (rank) =>
    [`OI${LETTERS[rank]}`, `${LETTERS[rank]}IO`, `O${LETTERS[rank]}I`];
  const shapeText = (shape) => shape.join("x");
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const each = (value, rank) => (Array.isArray(value) ? value : Array(rank).fill(value));
  const compact = (values) => (new Set(values).size > 1 ? values : values[0]);

  // Returns a value in the notation of the command line: 2, or 2,1, or 0:1,1:1.
  const optionText = (value) => [value].flat().map((one) => [one].flat().join(":")).join();

  // Returns a value in Python's notation.
  function python(value) {
    if (value === null) return "None";
    if (typeof value === "string") return `"${value}"`;
    if (!Array.isArray(value)) return String(value);
    return `(${value.map(python).join(", ")}${value.length === 1 ? "," : ""})`;
  }

  class ConvError extends Error {
    // offers: whether fixes are tried and suggested in place of the remedy.
    constructor(rule, values, remedy = "", { axis = null, offers = false } = {}) {
      super(rule);
      Object.assign(this, { rule, values, remedy, axis, offers, fixes: [] });
    }

    get text() {
      const where = this.axis ? ` (axis ${this.axis})` : "";
      return `${this.rule}${where}: ${this.values}${this.remedy ? `. ${this.remedy}` : ""}`;
    }
  }

  // -- a valid layer -------------------------------------------------------------------------------

  class Axis {
    constructor(name, input, filter, stride, dilation, before, after, mode) {
      Object.assign(this, { name, input, filter, stride, dilation, before, after, mode });
    }

    get span() {
      return (this.filter - 1) * this.dilation + 1;
    }

    get padded() {
      return this.input + this.before + this.after;
    }

    get output() {
      if (this.mode.startsWith("same")) return Math.ceil(this.input / this.stride);
      return Math.floor((this.padded - this.span) / this.stride) + 1;
    }

    get formula() {
      const { input, before, after, stride } = this;
      if (this.mode.startsWith("same")) return `ceil(${input}/${stride}) = ${this.output}`;
      return `floor((${input} + ${before} + ${after} - ${this.span})/${stride}) + 1 = ${this.output}`;
    }

    // The smallest input size with this output; below 1 if padding alone suffices.
    get firstInput() {
      const first = (this.output - 1) * this.stride + 1;
      return this.mode.startsWith("same") ? first : first + this.span - 1 - this.before - this.after;
    }

    // PyTorch's output_padding: the number of last positions of the padded input that no window reaches.
    get outputPadding() {
      return this.padded - this.span - (this.output - 1) * this.stride;
    }

    // The first and last input size with this output.
    get inputs() {
      return [Math.max(this.firstInput, 1), this.firstInput + this.stride - 1];
    }

    // The axis with another input size; SAME padding depends on the size.
    ofInput(size) {
      const rule = [size, this.filter, this.stride, this.dilation];
      const pair = this.mode.startsWith("same") ? samePadding(this.mode, ...rule) : [this.before, this.after];
      return new Axis(this.name, ...rule, ...pair, this.mode);
    }

    // All triples (input, tap, output) in which the tap reads the input for the output, as a flat array.
    get triples() {
      const { input, filter, output, stride, dilation, before } = this;
      const found = new Int32Array(3 * filter * output);
      let end = 0;
      for (let o = 0; o < output; o++)
        for (let r = 0; r < filter; r++) {
          const i = o * stride - before + r * dilation;
          if (i < 0 || i >= input) continue;
          found[end++] = i;
          found[end++] = r;
          found[end++] = o;
        }
      return found.subarray(0, end);
    }

    get unread() {
      const read = new Set(this.triples.filter((_, place) => place % 3 === 0));
      return span(this.input).filter((i) => !read.has(i));
    }
  }

  function samePadding(mode, size, taps, stride, dilation) {
    const output = Math.ceil(size / stride);
    const total = Math.max((output - 1) * stride + (taps - 1) * dilation + 1 - size, 0);
    const halves = [Math.floor(total / 2), total - Math.floor(total / 2)];
    return mode === "same" ? halves : halves.reverse();
  }

  function positive(what, value, rank) {
    each(value, rank).forEach((number, i) => {
      const axis = Array.isArray(value) ? LETTERS[rank][i] : null;
      if (number < 1) throw new ConvError(`${what} must be at least 1`, `got ${number}`, "Use 1 or more", { axis });
    });
    return each(value, rank);
  }

  function formatsOf(layer, rank) {
    const data = layer.data_format?.toUpperCase() ?? dataFormats(rank)[0];
    const filter = layer.filter_format?.toUpperCase() ?? filterFormats(rank)[data.endsWith("C") ? 1 : 0];
    return [data, filter];
  }

  const ordered = (shape, format, letters) => [...letters].map((letter) => shape[format.indexOf(letter)]);

  // Returns a layer with its sizes, formats and axes.  Throws a ConvError without fixes.
  function checked(layer) {
    const { input_shape: x, filter_shape: w, groups = 1, padding = 0 } = layer;
    const rank = x.length - 2;
    const letters = LETTERS[rank];
    const [dataFormat, filterFormat] = formatsOf(layer, rank);
    const stride = positive("stride", layer.stride ?? 1, rank);
    const dilation = positive("dilation", layer.dilation ?? 1, rank);
    if (groups < 1)
      throw new ConvError("groups must be at least 1", `got ${groups}`, "Use 1 or more", { offers: true });
    const [N, C, ...input] = ordered(x, dataFormat, `NC${letters}`);
    const [K, I, ...taps] = ordered(w, filterFormat, `OI${letters}`);
    if (N < 0)
      throw new ConvError("the batch must not be negative", `the input has ${N}`, "Use 0 or more");
    const sizes = [["C", "input", C], ["O", "filter", K], ["I", "filter", I],
      ...input.map((size, i) => [letters[i], "input", size]),
      ...taps.map((size, i) => [letters[i], "filter", size])];
    for (const [letter, owner, size] of sizes)
      if (size < 1)
        throw new ConvError("every size but the batch must be at least 1", `the ${owner} has ${letter} = ${size}`,
          `Use positive sizes: input ${shapeText(x)} was read as ${dataFormat}, filter ` +
          `${shapeText(w)} as ${filterFormat}`);
    const order = `${shapeText(w)} (${filterFormat})`;
    for (const [owner, count, read] of [["the input", C, ""], ["the output", K, `; filter ${order} has O = ${K}`]])
      if (count % groups)
        throw new ConvError(`groups must divide ${owner} channels`,
          `${owner} has ${count}, groups=${groups}${read}`, "", { offers: true });
    if (I !== C / groups)
      throw new ConvError("the filter's input channels must be the input's channels divided by groups",
        `input ${shapeText(x)} (${dataFormat}) has C = ${C}, groups=${groups}, so ` +
        `${C / groups} per filter; filter ${order} has I = ${I}`, "", { offers: true });
    const word = typeof padding === "string" ? padding.toLowerCase() : null;
    const pairs = word ? input.map(() => [0, 0]) : each(padding, rank).map((one) => each(one, 2));
    pairs.forEach((pair, i) => {
      if (Math.min(...pair) < 0)
        throw new ConvError("padding must not be negative", `got ${python(pair)}`,
          "Crop the input instead, and pad by 0", { axis: letters[i] });
    });
    const mode = word ?? "explicit";
    const axes = input.map((size, i) => {
      const rule = [size, taps[i], stride[i], dilation[i]];
      const pair = mode.startsWith("same") ? samePadding(mode, ...rule) : pairs[i];
      return new Axis(letters[i], ...rule, ...pair, mode);
    });
    for (const axis of axes) {
      if (axis.output >= 1) continue;
      throw new ConvError("the filter must fit into the padded input",
        `a filter of ${axis.filter} with dilation ${axis.dilation} spans ${axis.span}, the input of ` +
        `${axis.input} with padding (${axis.before}, ${axis.after}) has ${axis.padded}`, "",
        { axis: axis.name, offers: true });
    }
    const places = { N, C: K };
    axes.forEach((axis) => (places[axis.name] = axis.output));
    return { layer, rank, N, C, K, groups, groupChannels: C / groups, groupFilters: K / groups, axes,
      isUneven: axes.some((axis) => axis.before !== axis.after), mode, stride, dilation, dataFormat, filterFormat,
      outputShape: [...dataFormat].map((letter) => places[letter]) };
  }

  // Returns a layer with its sizes, formats and axes.  Throws a ConvError with the fixes that work.
  function problem(layer) {
    try {
      return checked(layer);
    } catch (error) {
      if (error.offers) offer(error, layer);
      throw error;
    }
  }

  // -- fixes -----------------------------------------------------------------------------------------
  // A fix is { changes, phrases }: the changed arguments, and phrases that describe them.  A phrase is
  // a text, or a pair of an argument's name and its new value.

  const MOST_ORDERS = 2, MOST_OTHERS = 4, MOST_PAIRS = 2;

  function offer(error, layer) {
    const found = working(new Call(layer, error.axis));
    if (!found.length) return;
    error.fixes = found.map((fix) => ({ changes: fix.changes, text: wayOut(fix.phrases) }));
    const texts = error.fixes.map((fix) => fix.text);
    const last = texts.pop();
    const comma = texts.length > 1 && found.some(({ phrases }) => phrases.length > 1) ? ";" : ",";
    const text = texts.length ? [...texts, `or ${last}`].join(`${comma} `) : last;
    error.remedy = text[0].toUpperCase() + text.slice(1);
  }

  function wayOut(phrases) {
    const used = phrases.filter(Array.isArray).map(([name, value]) => `${name}=${python(value)}`);
    const texts = phrases.filter((phrase) => !Array.isArray(phrase));
    return (used.length ? [`use ${used.join(" and ")}`, ...texts] : texts).join(" and ");
  }

  function works(layer) {
    try {
      return Boolean(checked(layer));
    } catch {
      return false;
    }
  }

  const valid = (call, fixes) => fixes.filter((fix) => works({ ...call.layer, ...fix.changes }));

  function working(call) {
    const [orders, others] = [call.orders(), call.others()];
    // A filter with as many taps on each axis is hardly one of another shape in another order.
    const plausible = orders.filter((fix) => call.score()[0] > 1 || call.after(fix).score()[0] === 1);
    const swaps = distinct(valid(call, plausible), MOST_ORDERS);
    const changes = distinct(valid(call, others), MOST_OTHERS);
    if (swaps.length || changes.length) {
      const keys = (fix) => Object.keys(fix.changes);
      const isLikely = (fix) => !(more(call.after(fix).score(), call.score()) > 0) &&
        !("filter_shape" in fix.changes && "input_shape" in fix.changes);
      const likely = swaps.filter(isLikely);
      const data = likely.filter((fix) => keys(fix).some((key) => !key.startsWith("filter_")));
      const unlikely = swaps.filter((fix) => !isLikely(fix));
      const found = [...data, ...valid(call, call.depthwise()), ...likely, ...changes, ...unlikely];
      return distinct(found, MOST_ORDERS + MOST_OTHERS);
    }
    const pairs = [];
    for (const first of [...orders, ...others]) {
      const after = call.after(first);
      if (more(after.score(), call.score()) > 0) continue;
      const apart = after.others().filter((second) =>
        !Object.keys(second.changes).some((key) => key in first.changes));
      pairs.push(...valid(call, apart.map((second) => both(first, second))));
      if (distinct(pairs, MOST_PAIRS).length === MOST_PAIRS) break;
    }
    return distinct(pairs, MOST_PAIRS);
  }

  // Returns the first fixes, at most `most`, without those that contain all changes of an earlier one.
  function distinct(fixes, most) {
    const found = [];
    for (const fix of fixes) {
      if (found.length === most) break;
      const contains = (other) =>
        Object.entries(other.changes).every(([key, value]) => key in fix.changes && same(fix.changes[key], value));
      if (!found.some(contains)) found.push(fix);
    }
    return found;
  }

  function both(first, second) {
    const again = second.phrases.filter(Array.isArray).map(([name]) => name);
    const kept = first.phrases.filter((one) => !Array.isArray(one) || !again.includes(one[0]));
    return { changes: { ...first.changes, ...second.changes }, phrases: [...kept, ...second.phrases] };
  }

  // Compares lists of numbers in lexicographic order; the result is positive if a comes after b.
  function more(a, b) {
    const i = a.findIndex((one, place) => one !== b[place]);
    return i < 0 ? 0 : a[i] - b[i];
  }

  class Call {
    constructor(layer, axis = null) {
      this.layer = { stride: 1, padding: 0, dilation: 1, groups: 1, ...layer };
      this.axis = axis;
      this.rank = layer.input_shape.length - 2;
      this.letters = [...LETTERS[this.rank]];
      [this.data, this.filter] = formatsOf(layer, this.rank);
    }

    after(fix) {
      return new Call({ ...this.layer, ...fix.changes });
    }

    order(key) {
      return key === "filter_shape" ? this.filter : this.data;
    }

    size(key, letter) {
      return this.layer[key][this.order(key).indexOf(letter)];
    }

    assigned(key, value) {
      return { changes: { [key]: value }, phrases: [[key, value]] };
    }

    resized(key, sizes, phrase = "") {
      const shape = [...this.layer[key]];
      for (const [letter, size] of Object.entries(sizes)) shape[this.order(key).indexOf(letter)] = size;
      const text = Object.entries(sizes).map(([letter, size]) => `${letter} = ${size}`).join(" and ");
      const owner = key === "input_shape" ? "the input" : "the filter";
      return { changes: { [key]: shape }, phrases: [phrase || `use ${text} for ${owner}`] };
    }

    reordered(key, source) {
      return this.assigned(key, [...this.order(key)].map((letter) => this.layer[key][source.indexOf(letter)]));
    }

    sizesText(sizes) {
      const entries = Object.entries(sizes);
      if (entries.length === this.rank) return Object.values(sizes).join(" by ");
      if (entries.length === 1 && entries[0][0] === this.axis) return String(entries[0][1]);
      return entries.map(([axis, size]) => `${axis} = ${size}`).join(" and ");
    }

    paddingPhrase(missing) {
      const [axes, amounts] = [Object.keys(missing), Object.values(missing)];
      if (axes.length === 1 && (axes[0] === this.axis || this.rank === 1))
        return `pad by ${amounts[0]} more in total`;
      if (axes.length === this.rank && new Set(amounts).size === 1)
        return `pad by ${amounts[0]} more in total on each axis`;
      return `pad ${axes.map((axis) => `${axis} by ${missing[axis]}`).join(" and ")} more in total`;
    }

    orders() {
      const [other] = dataFormats(this.rank).filter((one) => one !== this.data);
      const first = [this.assigned("data_format", other), this.reordered("input_shape", other)];
      const fixes = [...first, ...this.filters()];
      for (const fix of first) {
        const changed = this.after(fix);
        fixes.push(...[...changed.filters(), ...changed.lists()].map((one) => both(fix, one)));
      }
      const unlikeliness = (fix) => [+("input_shape" in fix.changes), ...this.after(fix).score(),
        Object.keys(fix.changes).length];
      const keyed = fixes.map((fix) => [unlikeliness(fix), fix]);
      return keyed.sort(([a], [b]) => more(a, b)).map(([, fix]) => fix);
    }

    filters() {
      const others = filterFormats(this.rank).filter((one) => one !== this.filter);
      const exchanged = this.filter.replace(/[OI]/g, (one) => (one === "O" ? "I" : "O"));
      return [...others.map((one) => this.assigned("filter_format", one)),
        this.reordered("filter_shape", exchanged)];
    }

    // Filters with a smaller score are likelier.
    score() {
      const sizes = this.letters.map((axis) => this.size("filter_shape", axis));
      return [Math.max(...sizes) / Math.max(Math.min(...sizes), 1), Math.max(...sizes)];
    }

    lists() {
      return ["stride", "dilation"].flatMap((key) => {
        const values = [this.layer[key]].flat();
        const spatial = values.length === 1 ? each(values[0], this.rank) : values;
        const changed = compact(spatial.map((one) => Math.max(one, 1)));
        return same([changed].flat(), values) ? [] : [this.assigned(key, changed)];
      });
    }

    others() {
      return [...this.lists(), ...this.channels(), ...this.windows()];
    }

    channels() {
      const [channels, depth] = [this.size("input_shape", "C"), this.size("filter_shape", "I")];
      const filters = this.size("filter_shape", "O");
      if (Math.min(channels, depth, filters) < 1) return [];
      const { groups } = this.layer;
      const count = Math.max(groups, 1);
      const fixes = [];
      if (channels % depth === 0) fixes.push(this.assigned("groups", channels / depth));
      if (channels % count === 0) fixes.push(this.resized("filter_shape", { I: channels / count }));
      fixes.push(this.resized("input_shape", { C: depth * count }));
      const common = gcd(gcd(count, channels), filters);
      if (common !== count)
        fixes.push(both(this.assigned("groups", common), this.resized("filter_shape", { I: channels / common })));
      for (const multiple of [Math.floor(filters / count) * count, Math.ceil(filters / count) * count])
        if (multiple > 0) fixes.push(this.resized("filter_shape", { O: multiple }));
      return fixes;
    }

    depthwise() {
      const [channels, filters] = [this.size("input_shape", "C"), this.size("filter_shape", "O")];
      const fits = this.layer.groups === 1 && this.size("filter_shape", "I") === 1 && channels > 1;
      return fits && filters % channels === 0 ? [this.assigned("groups", channels)] : [];
    }

    // Fixes that make the filter fit into the padded input.
    windows() {
      const { padding } = this.layer;
      const [strides, dilations] = ["stride", "dilation"].map((key) => each(this.layer[key], this.rank));
      if (padding === "same" || padding === "same_lower" || Math.min(...strides, ...dilations) < 1) return [];
      const pads = each(padding === "valid" ? 0 : padding, this.rank).map((one) => each(one, 2));
      const all = this.letters.map((axis, i) => {
        const [size, taps] = ["input_shape", "filter_shape"].map((key) => this.size(key, axis));
        const room = size + pads[i][0] + pads[i][1];
        return { axis, size, taps, step: dilations[i], room, span: (taps - 1) * dilations[i] + 1 };
      });
      const short = all.filter((one) => one.span > one.room);
      if (!short.length) return [];
      const pick = (value) => Object.fromEntries(short.map((one) => [one.axis, value(one)]));
      const fixes = [];
      const halves = all.map((one) => (one.span - 1) / 2);
      if (!pads.flat().some(Boolean) && Math.max(...dilations) > 1 && Math.max(...strides) === 1 &&
          halves.every(Number.isInteger))
        fixes.push({ changes: { padding: halves.map((half) => [half, half]) }, phrases: [["padding", compact(halves)]] });
      const missing = pick((one) => one.span - one.room);
      const padded = pads.map(([before, after], i) => [before, after + (missing[this.letters[i]] ?? 0)]);
      fixes.push({ changes: { padding: padded }, phrases: [this.paddingPhrase(missing)] });
      const inputs = pick((one) => one.size + one.span - one.room);
      fixes.push(this.resized("input_shape", inputs, `use an input of at least ${this.sizesText(inputs)}`));
      const largest = pick((one) => Math.floor((one.room - 1) / one.step) + 1);
      fixes.push(this.resized("filter_shape", largest, `use a filter of at most ${this.sizesText(largest)}`));
      if (short.every((one) => one.taps > 1)) {
        const fitting = pick((one) => Math.floor((one.room - 1) / (one.taps - 1)));
        const changed = compact(all.map((one) => fitting[one.axis] ?? one.step));
        fixes.push({ changes: { dilation: changed }, phrases: [`use a dilation of at most ${this.sizesText(fitting)}`] });
      }
      return fixes;
    }
  }

  return { LETTERS, ConvError, problem, formatsOf, dataFormats, filterFormats, ordered, shapeText, python,
    optionText, compact, each, same, span };
})();
