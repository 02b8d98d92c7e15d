// Random numbers and small convolutions, as in cupyconv/explaining/values.py.
const tensors = (() => {
  const PERIOD = 999983; // as in values.py

  // Returns the start of the hashes of the tensor at a place.
  const firstNumber = (seed, place = 0) =>
    Number(((BigInt(seed) + 1n) * 123457n + BigInt(place) * 223607n) % BigInt(PERIOD));

  // Returns random numbers, each of which depends on its index only.
  function numbers(first, sizes, kind) {
    const { floor } = Math;
    let hashes = [first];
    for (const size of sizes) {
      const next = new Float64Array(hashes.length * size);
      for (let i = 0; i < next.length; i++) {
        const h = (hashes[floor(i / size)] + (i % size)) % PERIOD;
        next[i] = (((h * h) % PERIOD) * h) % PERIOD;
      }
      hashes = next;
    }
    return hashes.map(kind !== "normal" ? (h) => (h % 7) - 3
      : (h) => Math.fround((2 * ((h % 100) + (floor(h / 100) % 100) + floor(h / 10000)) - 297) / 100));
  }

  const product = (sizes) => sizes.reduce((n, size) => n * size, 1);

  // Returns an array in another order of its axes.
  function permuted(array, sizes, order) {
    if (order.every((axis, i) => axis === i)) return array;
    const strides = sizes.map((_, i) => product(sizes.slice(i + 1)));
    const result = new Float64Array(array.length);
    const at = order.map(() => 0);
    let from = 0;
    for (let i = 0; i < result.length; i++) {
      result[i] = array[from];
      for (let axis = order.length - 1; axis >= 0; axis--) {
        from += strides[order[axis]];
        if (++at[axis] < sizes[order[axis]]) break;
        from -= at[axis] * strides[order[axis]];
        at[axis] = 0;
      }
    }
    return result;
  }

  // Sizes of x, w and dy in the order of their indices: n, c, h, w.
  function sizes(problem) {
    const { N, C, K, groups, axes } = problem;
    return {
      x: [N, C, ...axes.map((axis) => axis.input)],
      w: [K, C / groups, ...axes.map((axis) => axis.filter)],
      dy: [N, K, ...axes.map((axis) => axis.output)],
    };
  }

  // Returns the size of one of all tensors: dy, for example, has the size of y.
  const sizeOf = (problem, name) => sizes(problem)[{ x: "x", w: "w", y: "dy" }[name.at(-1)]];

  // Returns random x, w and dy, with their axes in the order of their indices.
  //
  // kind: "normal"; "integers"; or the name of the tensor that is 1 in its middle and 0 elsewhere,
  // while the others have integers.
  // edits: values that are set by hand, keyed by names such as "x[0,1,2,3]".
  function draw(problem, seed, kind, edits = {}) {
    const letters = rules.LETTERS[problem.rank];
    const found = {};
    for (const [place, [name, size]] of Object.entries(sizes(problem)).entries()) {
      const [format, logical] = name === "w"
        ? [problem.filter_format, `OI${letters}`] : [problem.data_format, `NC${letters}`];
      const order = [...logical].map((letter) => format.indexOf(letter));
      const stored = [...format].map((letter) => size[logical.indexOf(letter)]);
      found[name] = permuted(numbers(firstNumber(seed, place), stored, kind), stored, order);
      if (kind !== name) continue;
      found[name].fill(0);
      found[name][placeOf(size, middle(size))] = 1;
    }
    for (const [element, value] of Object.entries(edits)) {
      const [name, index] = parsed(element);
      found[name][placeOf(sizes(problem)[name], index)] = Math.fround(value);
    }
    return found;
  }

  const placeOf = (size, index) => index.reduce((place, at, i) => place * size[i] + at, 0);

  // Returns the tensor and the index of a name such as "x[0,1,2,3]"; null for other texts.
  function parsed(element) {
    const [, name, index] = /^(x|w|dy)\[(\d+(?:,\d+)*)\]$/.exec(element) ?? [];
    return name ? [name, index.split(",").map(Number)] : null;
  }

  // Returns whether a name is that of an element of x, w or dy.
  function isElement(problem, element) {
    const [name, index] = parsed(element) ?? [];
    const size = sizes(problem)[name];
    return Boolean(size) && index.length === size.length && index.every((one, i) => one < size[i]);
  }

  const isNumber = (value) => Number.isFinite(Math.fround(value)); // finite as a float32

  // Returns the index of the middle element of the first image, or of the first filter.
  const middle = (size) => size.map((one, i) => (i || size.length < 3 ? one >> 1 : 0));

  // Returns x, w and dy together with y, dx and dw, which it computes.
  function run(problem, { x, w, dy }) {
    const { N, C, K, groups, axes } = problem;
    const [y, dx, dw] = [dy, x, w].map(({ length }) => new Float64Array(length));
    const loops = axes.map((axis) => ({ ...axis, triples: rules.triples(axis), output: axis.output }));
    // Adds all products of axis i and the axes after it; a, b and c are places in x, w and dy.
    const add = (i, a, b, c) => {
      const { triples, input, filter, output } = loops[i];
      const isLast = i === loops.length - 1;
      for (let t = 0; t < triples.length; t += 3) {
        const h = a * input + triples[t];
        const r = b * filter + triples[t + 1];
        const p = c * output + triples[t + 2];
        if (isLast) {
          y[p] += x[h] * w[r];
          dx[h] += dy[p] * w[r];
          dw[r] += dy[p] * x[h];
        } else add(i + 1, h, r, p);
      }
    };
    const [channels, filters] = [C / groups, K / groups];
    for (let n = 0; n < N; n++)
      for (let k = 0; k < K; k++) {
        const out = n * K + k;
        const first = Math.floor(k / filters) * channels;
        for (let own = 0; own < channels; own++) add(0, n * C + first + own, k * channels + own, out);
      }
    return { x, w, dy, y, dx, dw };
  }

  // Returns all tensors of a state of the knobs.
  //
  // y, dy: names of the layer's result and of its gradient, which is that of the chosen loss; for a
  // transposed layer, these are "dx" and "x".
  function all(problem, { seed, values, loss, edits }, y = "y", dy = "dy") {
    const data = draw(problem, seed, values, edits);
    if (loss === "sum") data[dy].fill(1);
    if (loss === "squares") data[dy] = run(problem, data)[y].map(Math.fround);
    return run(problem, data);
  }

  // Returns a list: for each number in `added`, the loss with this number added to an element of an operand.
  function losses(problem, data, loss, name, index, added, y, dy) {
    const place = placeOf(sizes(problem)[name], index);
    const sum = (result) =>
      result.reduce((total, value, i) => total + value * (loss === "squares" ? value / 2 : data[dy][i]), 0);
    return added.map((step) => sum(run(problem, { ...data,
      [name]: data[name].map((value, i) => (i === place ? value + step : value)) })[y]));
  }

  // Returns the sum of a tensor over each of its channels, over all images.
  function sums(problem, name, array) {
    const [images, channels, ...inner] = sizeOf(problem, name);
    const length = product(inner);
    const found = new Float64Array(channels);
    for (let i = 0; i < images * channels * length; i++) found[Math.floor(i / length) % channels] += array[i];
    return found;
  }

  // Returns the number of elements of x, w and dy, and the number of products of a pass, in which
  // products with padding count too.
  function cost(problem) {
    const { N, C, K, groups, axes } = problem;
    const numbers = Object.values(sizes(problem)).reduce((n, size) => n + product(size), 0);
    const pairs = product(axes.map((axis) => axis.filter * axis.output));
    return { numbers, products: (N * K * C * pairs) / groups };
  }

  return { firstNumber, numbers, draw, run, all, losses, sums, parsed, isElement, isNumber, cost, sizes, sizeOf, middle, product };
})();
