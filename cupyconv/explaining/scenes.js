// Scenes of layers, as cupyconv/explaining/scene.py describes them, and the programs to copy;
// the lines of other frameworks are those of cupyconv/explaining/translate.py.
const scenes = (() => {
  const LETTERS = {
    input: { 1: "w", 2: "hw", 3: "dhw" },
    filter: { 1: "s", 2: "rs", 3: "trs" },
    output: { 1: "q", 2: "pq", 3: "zpq" },
  };
  // Names of a transposed layer's tensors in the convolution that it reverses, and vice versa.
  const NAMES = { x: "dy", w: "w", y: "dx", dy: "x", dx: "y", dw: "dw" };
  // Returns a function that returns the layer's name of a tensor of the problem, and vice versa.
  const naming = (isTransposed) => (tensor) => (isTransposed ? NAMES[tensor] : tensor);

  const the = (count, noun) => (count === 1 ? `the only ${noun}` : `the ${count} ${noun}s`);

  // Returns all pairs of operand positions that contribute to a position of a result along an axis.
  function meetings(tensor, axis, position) {
    const { input, filter, output, stride, dilation, pad_before } = axis;
    const inside = ([h]) => 0 <= h && h < input;
    if (tensor === "y")
      return rules.span(filter).map((r) => [position * stride - pad_before + r * dilation, r]).filter(inside);
    if (tensor === "dw")
      return rules.span(output).map((p) => [p * stride - pad_before + position * dilation, p]).filter(inside);
    return rules.span(filter)
      .map((r) => [(position + pad_before - r * dilation) / stride, r])
      .filter(([p]) => Number.isInteger(p) && 0 <= p && p < output);
  }

  // Returns the first position of dx with the most terms among the first positions.
  function busiest(axis, places) {
    const counts = rules.span(Math.min(axis.input, Math.floor(places / 2)))
      .map((position) => meetings("dx", axis, position).length);
    return counts.indexOf(Math.max(...counts));
  }

  // Returns how each result is computed.  `first` is the data of the page, as in `blank`.
  function directions(problem, { passes, turned, isTransposed }) {
    const called = naming(isTransposed);
    const [X, DY, Y, DX] = ["x", "dy", "y", "dx"].map(called);
    const { rank, N, groups, groupChannels, groupFilters, axes, stride } = problem;
    const [h, r, p] = ["input", "filter", "output"].map((kind) => [...LETTERS[kind][rank]].join());
    const [x, w, dy] = [`${X}[n,c,${h}]`, `w[k,c,${r}]`, `${DY}[n,k,${p}]`];
    const where = groups > 1 ? " of its group" : "";
    const comma = (letters) => letters.split(",").join(", ");
    const reads = axes.map(({ stride, pad_before, dilation }, i) => {
      const [at, tap, output] = ["input", "filter", "output"].map((kind) => LETTERS[kind][rank][i]);
      return `${at} = ${stride > 1 ? `${stride}*` : ""}${output}${pad_before ? ` - ${pad_before}` : ""} + ` +
        `${dilation > 1 ? `${dilation}*` : ""}${tap}`;
    }).join(", ");
    const isPadded = axes.some((axis) => axis.pad_before || axis.pad_after);
    const of = (tensor, condition, parts) =>
      ({ tensor, ...passes[tensor], note: passes[tensor].notes[+condition], ...parts });
    return {
      dw: of("dw", isPadded, {
        pair: `dw[{k},{own}] depends on channel {c} of ${X} and channel {k} of ${DY} only. Each pair fills its ` +
          "own cell: nothing is tiled, broadcast or averaged.",
        rules: axes.map((axis) => filter_gradient_axis(axis).rule), terms: N, rule: `dw[k,c,${r}] = sum over n, ${comma(p)} of ${dy} * ${x}, where ${reads}`,
        at: axes.map((axis) => axis.filter >> 1) }),
      dx: of("dx", Math.max(...stride) > 1, {
        pair: `Each cell shows w[k,c], through which ${DY}[k] gives a summand of ${DX}[c]. ${DX}[{c}] is the sum over ` +
          `its column, ${the(groupFilters, "channel")} of ${DY}${where}; w[{k},{own}] gives the summand of ${DY}[{k}].`,
        rules: axes.map((axis) => input_gradient_axis(axis).rule), terms: groupFilters,
        rule: `${DX}[n,c,${h}] = sum over k, ${comma(r)} of ${dy} * ${w}, where ${reads}`,
        at: axes.map((axis) => busiest(axis, turned.places)) }),
      y: of("y", isPadded, {
        pair: `Each cell shows w[k,c], through which ${X}[c] gives a summand of ${Y}[k]. ${Y}[{k}] is the sum over ` +
          `its row, ${the(groupChannels, "channel")} of ${X}${where}; w[{k},{own}] gives the summand of ${X}[{c}].`,
        rules: axes, terms: groupChannels, rule: `${Y}[n,k,${p}] = sum over c, ${comma(r)} of ${x} * ${w}, where ${reads}`,
        at: axes.map((axis) => Math.min(1, axis.output - 1)) }),
    };
  }

  // Returns why the page computes no values of a layer; empty if it computes them.
  function tooLarge(problem, most) {
    const { numbers, products } = tensors.cost(problem);
    if (!problem.N) return "The batch is empty, so there is nothing to compute.";
    if (numbers <= most.numbers && products <= most.products) return "";
    const [a, b, c, d] = [numbers, products, most.numbers, most.products].map((one) => one.toLocaleString("en"));
    return `x, w and dy have ${a} elements and a pass has ${b} products; the page computes values for at ` +
      `most ${c} elements and ${d} products. Turn the sizes down, or run the Python program that you can copy above.`;
  }

  // Returns the planes of an image of a tensor, or of all filters, in the format of page.py.
  function packed(array, size, image, isFilter) {
    const [first, second, ...inner] = size;
    const length = tensors.product(inner);
    const planes = {};
    for (const a of isFilter ? rules.span(first) : [image])
      for (const b of rules.span(second)) {
        const from = (a * second + b) * length;
        planes[isFilter ? `${a},${b}` : b] = array.subarray(from, from + length);
      }
    return { at: inner.map(rules.span), planes };
  }

  // Returns the scene of a layer without values.  `first` is the data of the page, from page.py.
  function blank(layer, first) {
    const problem = rules.problem(layer);
    const { groupFilters, groupChannels, axes } = problem;
    const plain = axes.every((axis) => axis.stride === 1 && axis.dilation === 1 && !axis.pad_before && !axis.pad_after);
    const { isTransposed } = first;
    const k = problem.K >> 1; // the middle, as in the text
    return { problem, isTransposed, opened: plain && !isTransposed ? "dw" : "dx", image: 0, k,
      c: Math.floor(k / groupFilters) * groupChannels + (groupChannels >> 1), directions: directions(problem, first), limits: first.turned, numbers: first.numbers,
      dtype: "float32", source: "", missing: {}, library: {}, values: {}, data: null };
  }

  // Returns the scene of a layer with all values, unless there are too many.
  //
  // knobs: { layer, values, seed, loss, edits }: ConvProblem's arguments, a kind of values, a seed, a
  // loss, and values set by hand, as in tensors.all.
  // first: the data of the page, whose limits apply to all scenes.
  // image: the image to draw.
  // known: all tensors of the layer, if they are already computed.
  function of(knobs, first, image = 0, known = null) {
    const made = { ...blank(knobs.layer, first), image, knobs, most: first.most };
    const { problem } = made;
    const reason = tooLarge(problem, first.most);
    const names = ["x", "w", "dy", "dw", "dx", "y"];
    if (reason) return { ...made, missing: Object.fromEntries(names.map((name) => [name, reason])) };
    const data = known ?? tensors.all(problem, knobs, ...["y", "dy"].map(naming(first.isTransposed)));
    const values = Object.fromEntries(names.map((name) =>
      [name, packed(data[name], tensors.sizeOf(problem, name), image, name.endsWith("w"))]));
    return { ...made, values, data, source: sourceOf(knobs, naming(first.isTransposed)) };
  }

  // Returns the name of an element with the other name of its tensor.
  const renamed = (element, called) => element.replace(/^(x|w|dy)(?=\[)/, called);

  const isDrawn = (values) => values === "normal" || values === "integers";

  function sourceOf({ values, seed, loss, edits = {} }, called) {
    const drawn = `random ${values === "normal" ? "data" : "integers"} of seed ${seed}`;
    const others = loss === "dot" ? "the others are" : `${values === called("x") ? "w" : "x"} is`;
    const first = isDrawn(values) ? "" : `${called(values)} is 1 in its middle and 0 elsewhere, ${others} `;
    const set = Object.entries(edits).map(([element, value]) => `, ${renamed(element, called)} = ${value}`);
    const fixed = { sum: "; dy is 1 everywhere", squares: "; dy is y" }[loss] ?? "";
    return `${first}${drawn}${set.join("")}${fixed}`;
  }

  // -- programs --------------------------------------------------------------------------------------

  const tuple = (values) => rules.python(rules.compact(values));
  const list = (values) => `[${values.map((one) => (Array.isArray(one) ? list(one) : one)).join(", ")}]`;

  function pytorch({ rank, axes, isUneven, stride, dilation, groups, mode }) {
    const rest = `stride=${tuple(stride)}, dilation=${tuple(dilation)}, groups=${groups}`;
    let [source, padding] = ["X", `padding=${tuple(axes.map((axis) => axis.pad_before))}`];
    if (isUneven) {
      const sides = [...axes].reverse().flatMap((axis) => [axis.pad_before, axis.pad_after]);
      [source, padding] = [`F.pad(X, ${rules.python(sides)})`, "padding=0"];
    } else if (mode.startsWith("same") && Math.max(...stride) === 1) padding = "padding='same'";
    return `F.conv${rank}d(${source}, W, ${padding}, ${rest})`;
  }

  function tensorflow(problem) {
    const { rank, axes, stride, dilation, groups, mode } = problem;
    let [source, padding] = ["X", `"${mode.toUpperCase()}"`];
    if (mode === "same_lower" || mode === "explicit") {
      const pairs = list([[0, 0], ...axes.map((axis) => [axis.pad_before, axis.pad_after]), [0, 0]]);
      if (!axes.some((axis) => axis.pad_before || axis.pad_after)) padding = '"VALID"';
      else if (rank === 2 && Math.max(...dilation) === 1) padding = pairs;
      else [source, padding] = [`tf.pad(X, ${pairs})`, '"VALID"'];
    }
    const left = axes.map((axis) => output_padding(axis));
    if (axes.every((axis) => axis.filter === 1) && left.some(Boolean)) {
      if (padding.startsWith("[")) source = `tf.pad(X, ${padding})`;
      const ends = axes.map((axis, i) => `:${axis.padded_input - left[i]}`).join(", ");
      [source, padding] = [`${source}[:, ${ends}]`, '"VALID"'];
    }
    const call = (x, w) => {
      if (rank === 1)
        return `tf.nn.conv1d(${x}, ${w}, stride=${stride[0]}, padding=${padding}, dilations=${dilation[0]})`;
      const [steps, gaps] = [stride, dilation].map((values) => list(rank === 2 ? values : [1, ...values, 1]));
      return `tf.nn.conv${rank}d(${x}, ${w}, strides=${steps}, padding=${padding}, dilations=${gaps})`;
    };
    if (groups === 1) return call(source, "W");
    return `tf.concat([${call("a", "b")} for a, b in zip(tf.split(${source}, ${groups}, -1), ` +
      `tf.split(W, ${groups}, -1))], -1)`;
  }

  function jax({ axes, stride, dilation, groups, mode, data_format, filter_format }) {
    const pairs = `[${axes.map((axis) => `(${axis.pad_before}, ${axis.pad_after})`).join(", ")}]`;
    const padding = mode === "explicit" ? pairs : `"${mode.toUpperCase()}"`;
    return `lax.conv_general_dilated(x, w, ${rules.python(stride)}, ${padding}, ` +
      `rhs_dilation=${rules.python(dilation)}, dimension_numbers=('${data_format}', '${filter_format}', ` +
      `'${data_format}'), feature_group_count=${groups}, precision='highest')`;
  }

  // The lines of a transposed layer; the problem is the convolution that it reverses.
  const inside = (axes) => axes.map((axis) => `${axis.pad_before}:${axis.pad_before + axis.input}`).join(", ");
  const extra = (axes) => rules.compact(axes.map((axis) => output_padding(axis)));

  function pytorchTransposed({ rank, axes, isUneven, stride, dilation, groups }) {
    const padding = isUneven ? "0" : tuple(axes.map((axis) => axis.pad_before));
    return `F.conv_transpose${rank}d(X, W, padding=${padding}, output_padding=${rules.python(extra(axes))}, ` +
      `stride=${tuple(stride)}, dilation=${tuple(dilation)}, groups=${groups})` +
      (isUneven ? `[:, :, ${inside(axes)}]` : "");
  }

  function tensorflowTransposed(problem) {
    const { rank, N, C, axes, stride, dilation, groups, mode } = problem;
    const left = axes.map((axis) => output_padding(axis));
    const isPadded = axes.every((axis) => axis.filter === 1) && left.some(Boolean);
    const isWord = !isPadded && (mode === "same" || mode === "valid");
    const hasPads = !isWord && axes.some((axis) => axis.pad_before || axis.pad_after);
    const isInNumbers = hasPads && !isPadded && rank === 2 && Math.max(...dilation) === 1;
    const isCropped = hasPads && !isInNumbers;
    const pads = list([[0, 0], ...axes.map((axis) => [axis.pad_before, axis.pad_after]), [0, 0]]);
    const padding = isInNumbers ? pads : `"${isWord ? mode.toUpperCase() : "VALID"}"`;
    const sizes = axes.map((axis, i) =>
      (isWord || isInNumbers ? axis.input : axis.padded_input) - (isPadded ? left[i] : 0));
    const each = (values) => rank === 1 ? values[0] : list(rank === 2 ? values : [1, ...values, 1]);
    const gaps = Math.max(...dilation) > 1 ? `, dilations=${each(dilation)}` : "";
    const call = (x, w) => `tf.nn.conv${rank}d_transpose(${x}, ${w}, ${list([N, ...sizes, C / groups])}, ` +
      `strides=${each(stride)}, padding=${padding}${gaps})`;
    const all = groups === 1 ? call("X", "W")
      : `tf.concat([${call("a", "b")} for a, b in zip(tf.split(X, ${groups}, -1), tf.split(W, ${groups}, -1))], -1)`;
    const zeros = `, ${list([[0, 0], ...left.map((one) => [0, one]), [0, 0]])})`;
    return (isPadded ? `tf.pad(${all}${zeros}` : all) + (isCropped ? `[:, ${inside(axes)}]` : "");
  }

  const jaxTransposed = (problem) =>
    `jax.linear_transpose(lambda y: ${jax(problem).replace("(x, w,", "(y, w,")}, ` +
    `jax.ShapeDtypeStruct(${rules.python(problem.input_shape)}, x.dtype))(x)[0]`;

  // Returns ConvProblem's arguments that differ from their defaults, as pairs of a name and a value.
  function changed(rank, layer) {
    const usual = { stride: 1, padding: 0, dilation: 1, groups: 1, data_format: rules.dataFormats(rank)[0],
      filter_format: rules.formatsOf({ data_format: layer.data_format }, rank)[1] };
    return Object.keys(usual).filter((name) => layer[name] !== usual[name]).map((name) => [name, layer[name]]);
  }

  function options({ rank, stride, dilation, axes, mode, groups, data_format, filter_format }) {
    return changed(rank, { stride: rules.compact(stride), padding: mode === "explicit" ? paddingOf(axes.map((axis) => [axis.pad_before, axis.pad_after])) : mode,
      dilation: rules.compact(dilation), groups, data_format: data_format, filter_format: filter_format });
  }

  // Returns explicit padding in its shortest form.
  function paddingOf(pairs) {
    if (pairs.some(([before, after]) => before !== after)) return pairs;
    return rules.compact(pairs.map(([before]) => before));
  }

  // Returns whether the library computes values only with its option large.
  function isLarge({ problem, knobs, most }) {
    const { numbers, products } = tensors.cost(problem);
    return Boolean(knobs.large) || numbers > most.elements || 2 * products > most.flops;
  }

  // Returns the shape of the layer's x, and its arguments that differ from their defaults.
  function own({ problem, isTransposed, knobs: { layer } }) {
    if (!isTransposed) return [layer.input_shape, options(problem)];
    const value = extra(problem.axes);
    return [problem.output_shape, [...options(problem), ["output_padding", value]]];
  }

  // Returns the command line that explains a layer with random values.
  function command(scene, element) {
    const { isTransposed, knobs: { layer, values, seed, dtype = "float32" } } = scene;
    const [x, arguments_] = own(scene);
    const words = ["cupyconv explain", shape_text(x), shape_text(layer.filter_shape)];
    if (isTransposed) words.push("--transposed");
    for (const [name, value] of arguments_) words.push(`--${name.replace("_", "-")} ${rules.optionText(value)}`);
    if (values !== "normal") words.push("--values integers");
    if (String(seed) !== "0") words.push(`--seed ${seed}`);
    if (dtype !== "float32") words.push(`--dtype ${dtype}`);
    if (isLarge(scene)) words.push("--large");
    if (element) words.push(`--element '${element}'`);
    return words.join(" ");
  }

  // Returns the lines of Python that make x, w and dy, with the values of the scene.
  function arrays({ problem, isTransposed, numbers, knobs: { layer, values, seed, loss, given = [], dtype = "float32", edits = {} } }) {
    const size = tensors.sizes(problem);
    const called = naming(isTransposed);
    const place = (name, index) => {
      const [format, logical] = name === "w" ? [problem.filter_format, "OI"] : [problem.data_format, "NC"];
      return [...format].map((letter) => index[`${logical}${rules.LETTERS[problem.rank]}`.indexOf(letter)]).join(", ");
    };
    const shapes = { x: layer.input_shape, w: layer.filter_shape, dy: problem.output_shape };
    if (loss === "squares" && !isTransposed) delete shapes.dy;
    const drawn = (shape, place) => `numbers(${tensors.firstNumber(seed, place)}, ${rules.python(shape)})`;
    const lines = Object.entries(shapes).map(([name, shape], place) => `${called(name)} = ` +
      (dtype.startsWith("complex") ? `(${drawn(shape, place)} + 1j * ${drawn(shape, place + 3)})` : drawn(shape, place)) +
      `.astype("${dtype === "bfloat16" ? "float32" : dtype}")` +
      (given.includes(name) ? "  # replace it by the array that you passed" : ""));
    if (loss === "sum") lines.push("dy[:] = 1  # the loss is sum(y)");
    const set = (name, index, value) => lines.push(`${called(name)}[${place(name, index)}] = ${value}`);
    if (!isDrawn(values)) {
      lines.push(`${called(values)}[:] = 0`);
      set(values, tensors.middle(size[values]), 1);
    }
    for (const [element, value] of Object.entries(edits)) {
      set(...tensors.parsed(element), value);
    }
    return [numbers[values === "normal" ? values : "integers"], ...lines];
  }

  // Returns the programs of a scene: for each, its name, its text, and a reason if it is left out.
  function programs(scene, element = "") {
    const { problem, isTransposed, knobs: { layer, values, seed, loss, given = [], dtype = "float32", edits = {} } } = scene;
    const { rank, data_format, filter_format } = problem;
    const called = naming(isTransposed);
    const [x, arguments_] = own(scene);
    const keywords = arguments_.map(([name, value]) => `${name}=${rules.python(value)}`);
    const isSquares = loss === "squares"; // then dy is y
    const gradient = `dy = cupyconv.${isTransposed ? "conv_transpose" : "conv_forward"}(${["x", "w", ...keywords].join(", ")})  # the loss is sum(y²) / 2`;
    if (dtype !== "float32") keywords.push(`dtype="${dtype}"`);
    const isRandom = isDrawn(values) && !Object.keys(edits).length && (loss ?? "dot") === "dot";
    const names = isRandom ? given.map(called) : ["x", "w", "dy"];
    const [helper, ...lines] = arrays(scene);
    const made = lines.filter((line) => names.some((name) => line.startsWith(name)));
    if (isSquares) made.push(gradient);
    const passed = names.map((name) => `${name}=${name}`);
    if (isRandom && values !== "normal") passed.push('values="integers"');
    if (isRandom && String(seed) !== "0") passed.push(`seed=${seed}`);
    if (isLarge(scene)) passed.push("large=True");
    const shapes = [x, layer.filter_shape].map(rules.python);
    const python = ["import cupyconv", ...(names.length ? ["import numpy as np", "", helper] : [""]),
      `problem = cupyconv.ConvProblem${isTransposed ? ".from_output" : ""}(${[...shapes, ...keywords].join(", ")})`, ...made,
      `explanation = cupyconv.explain(${["problem", ...(isTransposed ? ["transposed=True"] : []), ...passed].join(", ")})`,
      `explanation.show(${element ? `"${element}"` : ""})`];
    const shell = names.length ? "" : command(scene, element);
    const complex = dtype.startsWith("complex") ? "The programs below convert complex gradients." : "";
    const program = (imports, lines) => ["import numpy as np", ...imports, "", ...arrays(scene), ...lines].join("\n");
    // Returns the lines that convert x, w and dy to X, W and DY, in the orders of a framework.
    const converted = (isLast, tensor) => {
      const [data, filter] = [rules.dataFormats(rank)[isLast], rules.filterFormats(rank)[isLast]];
      const order = (source, target) => source === target ? ""
        : rules.python([...target].map((letter) => source.indexOf(letter)));
      const orders = { x: order(data_format, data), w: order(filter_format, filter), dy: order(data_format, data) };
      if (isSquares) delete orders.dy;
      return [`# X, Y and DX are ${data}, W and DW are ${filter}.`,
        ...Object.entries(orders).map(([name, axes]) => `${name.toUpperCase()} = ${tensor(name, axes)}`)];
    };
    const dy = (usual, y) => (isSquares ? `${y})  # the gradient of sum(Y²) / 2` : `${usual})`);
    const short = dtype === "bfloat16" ? ".bfloat16()" : "";
    return [
      { name: "Command line", text: shell, why: shell ? "" : given.length
        ? "The values are arrays that were passed. Pass their files with --x, --w and --dy."
        : "The command line has no option for these values." },
      { name: "Python", text: python.join("\n"), why: "" },
      { name: "PyTorch", why: complex, text: program(["import torch", "import torch.nn.functional as F"], [
        // PyTorch raises an error for the gradient of some permuted filters.
        ...converted(0, (name, axes) => `torch.from_numpy(${name})${short}${axes && `.permute${axes}`}` +
          `${axes && name === "w" ? ".contiguous()" : ""}` +
          `${name === "dy" ? "" : ".requires_grad_()"}`),
        `Y = ${(isTransposed ? pytorchTransposed : pytorch)(problem)}`, `DX, DW = torch.autograd.grad(Y, (X, W), ${dy("DY", "Y.detach()")}`]) },
      { name: "TensorFlow", why: complex && "TensorFlow has no complex convolution.", text: program(["import tensorflow as tf"], [
        ...converted(1, (name, axes) => `tf.constant(${name}${axes && `.transpose${axes}`}, tf.${dtype})`),
        "with tf.GradientTape() as tape:", "    tape.watch([X, W])", `    Y = ${(isTransposed ? tensorflowTransposed : tensorflow)(problem)}`,
        `DX, DW = tape.gradient(Y, [X, W], ${dy("DY", "Y")}`]) },
      { name: "JAX", why: complex, text: program(["import jax", "from jax import lax",
        ...(dtype === "float64" ? ["", 'jax.config.update("jax_enable_x64", True)'] : [])], [
        ...(short ? ["x, w, dy = (jax.numpy.asarray(one, \"bfloat16\") for one in (x, w, dy))"] : []),
        ...(isTransposed ? [`y = jax.ShapeDtypeStruct(${rules.python(layer.input_shape)}, x.dtype)`] : []),
        `Y, backward = jax.vjp(lambda x, w: ${(isTransposed ? jaxTransposed : jax)(problem)}, x, w)`, `DX, DW = backward(${dy("jax.numpy.asarray(dy)", "Y")}`]) },
    ];
  }

  return { LETTERS, naming, renamed, meetings, blank, of, programs, pytorch, tensorflow, jax, pytorchTransposed,
    tensorflowTransposed, jaxTransposed, paddingOf, changed };
})();
