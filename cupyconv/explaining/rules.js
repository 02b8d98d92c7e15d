// Layers of the page.  Module javascript.py writes the shape rules, such as ConvAxis and _require_sizes,
// which call the functions below that have the names of Python's.
const range = (...ends) => {
  const [start, stop] = ends.length > 1 ? ends : [0, ...ends];
  const length = Math.max(stop - start, 0);
  return { start, stop, length, at: (i) => (i < 0 ? stop + i : start + i) };
};
const zip = (first, second) => [...first].map((one, i) => [one, second[i]]);
const replace = (axis, changes) => Object.assign(Object.create(Object.getPrototypeOf(axis)), axis, changes);
const len = ({ length }) => length;
const str = String;
const integer = (_, value) => value;
const shape_text = (shape) => shape.join("x");

class ConvError extends Error {
  constructor(rule, values, remedy = "", options = remedy) {
    super(rule);
    Object.assign(this, { rule, values, remedy: typeof remedy === "string" ? remedy : "", axis: options.axis ?? null });
  }
}

const rules = (() => {
  const LETTERS = formats.SPATIAL_AXES;
  const NAMES = new Names();
  const span = (end) => Array.from({ length: Math.max(end, 0) }, (_, i) => i);
  const dataFormats = (rank) => [`NC${LETTERS[rank]}`, `N${LETTERS[rank]}C`];
  const filterFormats = (rank) =>
    [`OI${LETTERS[rank]}`, `${LETTERS[rank]}IO`, `O${LETTERS[rank]}I`];
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

  // Returns all triples (input, tap, output) along an axis in which the tap reads the input for the output,
  // as a flat array.
  function triples({ input, filter, output, stride, dilation, pad_before }) {
    const found = new Int32Array(3 * filter * output);
    let end = 0;
    for (let o = 0; o < output; o++)
      for (let r = 0; r < filter; r++) {
        const i = o * stride - pad_before + r * dilation;
        if (i < 0 || i >= input) continue;
        found[end++] = i;
        found[end++] = r;
        found[end++] = o;
      }
    return found.subarray(0, end);
  }

  // Returns the inputs that no tap reads.
  function unread(axis) {
    const read = new Set(triples(axis).filter((_, place) => place % 3 === 0));
    return span(axis.input).filter((i) => !read.has(i));
  }

  function formatsOf(layer, rank) {
    const data = layer.data_format?.toUpperCase() ?? dataFormats(rank)[0];
    const filter = layer.filter_format?.toUpperCase() ?? filterFormats(rank)[data.endsWith("C") ? 1 : 0];
    return [data, filter];
  }

  const ordered = (shape, format, letters) => [...letters].map((letter) => shape[format.indexOf(letter)]);

  // Returns a layer with its sizes, formats and axes, named as in ConvProblem.  Throws a ConvError.
  function problem({ input_shape, filter_shape, stride: steps = 1, padding = 0, dilation: gaps = 1, groups = 1, ...layer }) {
    const rank = input_shape.length - 2;
    const letters = LETTERS[rank];
    const [data_format, filter_format] = formatsOf(layer, rank);
    const [stride, dilation] = Object.entries({ stride: steps, dilation: gaps }).map(([what, value]) =>
      each(value, rank).map((one, i) => _positive(what, one, Array.isArray(value) ? letters[i] : null)));
    _positive("groups", groups);
    const [N, C, ...input_sizes] = ordered(input_shape, data_format, `NC${letters}`);
    const [K, , ...filter_sizes] = ordered(filter_shape, filter_format, `OI${letters}`);
    const filter_axes = [...`OI${letters}`].map((letter) => filter_format.indexOf(letter));
    const found = { rank, spatial_rank: rank, N, C, K, groups, groupChannels: C / groups, groupFilters: K / groups,
      input_shape, filter_shape, input_sizes, filter_sizes, filter_axes, stride, dilation, data_format, filter_format };
    _require_sizes(NAMES, found);
    _require_channels(NAMES, found);
    const mode = typeof padding === "string" ? padding.toLowerCase() : "explicit";
    const pairs = each(mode === "explicit" ? padding : 0, rank).map((one) => each(one, 2));
    _require_sides("padding", pairs, letters);
    const axes = input_sizes.map((size, i) =>
      new ConvAxis(letters[i], size, filter_sizes[i], stride[i], dilation[i], ...pairs[i], mode).of_input(size));
    axes.forEach((axis) => _require_window(NAMES, axis));
    const places = { N, C: K, ...Object.fromEntries(axes.map((axis) => [axis.name, axis.output])) };
    return { ...found, axes, mode, isUneven: axes.some((axis) => axis.pad_before !== axis.pad_after),
      output_shape: [...data_format].map((letter) => places[letter]) };
  }

  return { LETTERS, problem, triples, unread, formatsOf, dataFormats, filterFormats, ordered, python,
    optionText, compact, each, same, span };
})();
