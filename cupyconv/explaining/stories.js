// Stories: a few steps, each with a sentence and a picture of a small layer, that end on the knobs.
const STORIES = {
  channels: { title: "Which channels meet?", steps: channelSteps },
  size: { title: "Why is dx this size?", steps: sizeSteps },
  flip: { title: "Why does dx flip the filter?", steps: flipSteps },
  number: { title: "Where does this number come from?", steps: numberSteps },
};

let story = null; // the name of the open story, the number of its step, and the view

const SEED = "3097"; // the stories' numbers: no explained product, sum or difference is 0

// A step has a layer, an element, the parts of the page that are its picture ("windows" leaves out the
// sizes of dx), a function that returns its sentences, and the number of added products, by default all.

function channelSteps() {
  const layer = { input_shape: [1, 5, 6, 6], filter_shape: [10, 5, 3, 3] };
  const step = (element_, view, say, added) => ({ layer, element: element_, view, say, added });
  return [
    step("dw=0,0,1,1", "channels", () => "In the layer of this story, x has 5 channels, and dy, the gradient of the output, " +
      "has 10. The gradient of the filter is computed from both. Which channels are combined?"),
    step("dw=0,0,1,1", "channels", () => "Every channel of x is paired with every channel of dy. Channel 0 of x and " +
      "channel 0 of dy give dw[0,0], a slice of 3x3 elements. No other channel contributes to it."),
    step("dw=7,2,1,1", "channels", () => "Channel 2 of x and channel 7 of dy give the slice dw[7,2]: the cell in the " +
      "column of x[2] and the row of dy[7]."),
    step("dw=7,2,1,1", "planes", () => "To compute dw[7,2,1,1], lay dy[7] on x[2], shifted by one row and one column. " +
      "Multiply each element of dy by the element of x below it, and add the products.", 3),
    step("dw=7,2,2,0", "planes", () => "Another shift gives another element of the same slice. dy fits into x at 3x3 " +
      "shifts, which give the 3x3 elements of the slice."),
    step("dw=7,2,1,1", "channels", () => "10 channels of dy and 5 channels of x form 50 pairs. Each pair gives one slice, " +
      "so dw is 10x5x3x3, like the filter. Nothing is tiled, broadcast or averaged."),
    step("dx=0,2,2,2", "channels", () => "The gradient of the input is a sum instead. dx[2] has one summand for each cell of " +
      "its column: dy[k] times w[k,2], for all 10 k, because each of the 10 filters reads x[2]."),
    step("y=0,7,1,1", "channels", () => "The forward pass is a sum too: y[7] has one summand for each cell of its row, x[c] times " +
      "w[7,c]. Now turn the knobs: change the channels and filters, or split the grid into groups."),
  ];
}

function sizeSteps() {
  const step = (input, padding, element_, view, say, stride = 2) => ({ element: element_, view, say,
    layer: { input_shape: [1, 3, input, input], filter_shape: [4, 3, 3, 3], stride, padding } });
  return [
    step(5, "valid", "dx=0,1,2,2", "windows sizes", () => "dx has one value for each element of x, so it has the size " +
      "of x. But dx is computed from dy and the filter. Do their sizes determine the size of dx?"),
    step(5, "valid", "dx=0,1,2,2", "windows sizes", () => "With VALID padding and stride 2, a window begins at every " +
      "second input, as long as it fits. An input of 5 has room for 2 windows, so dy is 2x2."),
    step(6, "valid", "dx=0,1,2,2", "sizes", () => "An input of 6 also has room for 2 windows: no window reads its last " +
      "element. So a dy of 2x2 can belong to an x of 5x5 or of 6x6."),
    step(6, "valid", "dx=0,1,5,5", "planes", () => "For an x of 6x6, dx is 6x6. Its last row and column are zero: no " +
      "window reads these elements of x, so they do not affect y."),
    step(6, "valid", "dx=0,1,2,2", "sizes", () => "So you must pass the size to the function that computes dx: " +
      "input_sizes in TensorFlow, input_shape in cupyconv, output_padding in PyTorch. output_padding is the difference " +
      "from the smallest size with the same padding: 0 for 5x5, and 1 for 6x6."),
    step(5, "same", "dx=0,1,2,2", "sizes", () => "SAME pads an input of 5 so that it has 5/2 windows, rounded up: 3. An " +
      "input of 6 also has 3 windows, with less padding. Both have a dy of 3x3."),
    step(6, "same", "dx=0,1,2,2", "sizes", () => "The windows span 7 positions for both sizes, so the gradient of the " +
      "padded input is the same. dx is a part of it: for size 5, it begins after one position of padding; for size 6, at " +
      "the first position. The bars without taps show both parts. PyTorch pads both sides by the same number, so for " +
      "size 6 you crop its dx."),
    step(5, "same", "dx=0,1,1,1", "planes", () => "To compute a dx of 5x5 from a dy of 3x3, insert stride - 1 zeros " +
      "between its elements, here one zero, and pad the result. Then slide the flipped filter over it with stride 1. " +
      "This gives one summand of dx[1]; dx[1] adds those of all 4 filters."),
    step(5, "same", "dx=0,1,2,2", "sizes", () => "With stride 1, each output size has only one input size, so dx has only " +
      "one possible size. Now turn the knobs: change the stride, the padding or the input.", 1),
  ];
}

function flipSteps() {
  const step = (stride, element_, view, say, added, images = 1) => ({ element: element_, view, say, added,
    layer: { input_shape: [images, 1, 7], filter_shape: [1, 1, 3], stride } });
  return [
    step(1, "y=0,0,2", "planes", () => "Begin with the forward pass. y[2] reads x[2], x[3] and x[4], and multiplies " +
      "them by the taps w[0], w[1] and w[2]: both indices grow together. (The indices of the image and the channel are left out.)"),
    step(1, "dx=0,0,4", "windows sizes", () => "Now look down the column of x[4]. y[2] reads it through its last tap, " +
      "w[2], y[3] through w[1], and y[4] through w[0]. As the output grows, the tap falls: from the side of x, the taps run backwards."),
    step(1, "dx=0,0,4", "planes", () => "By the chain rule, dx[4] is a sum over the outputs that read x[4]: dy of the " +
      "output times the tap through which it reads. So dx[4] = dy[4] · w[0] + dy[3] · w[1] + dy[2] · w[2].", 1),
    step(1, "dx=0,0,4", "planes", () => "Therefore dx flips the filter: drawn backwards, it slides over dy like a " +
      "filter in the forward pass. dx[0] meets dy[0] only, so dy is padded by 2 on both sides."),
    step(2, "dx=0,0,4", "planes", () => "With stride 2, only every second tap reads x[4]: y[2] through w[0], and y[1] " +
      "through w[2]. The zero between these elements of dy leaves out w[1]."),
    step(1, "dw=0,0,1", "planes", () => "dw is not flipped. The tap w[1] multiplies x[1] for y[0], x[2] for y[1], and " +
      "so on: the position in x grows with the output. dw[1] is the sum of dy of each output times the element that it reads."),
    step(1, "dw=0,0,1", "planes", () => "A batch adds a sum over its images to dw: a sum, not a mean. If the loss is a " +
      "mean over 2 images, dy already contains the factor 1/2. A filter that two layers use adds up in the same way.", undefined, 2),
    step(1, "dx=0,0,4", "planes", () => `Check dx[4] without a formula for the gradient. ${differenceText()} Now turn ` +
      "the knobs: change the stride, the dilation or the padding."),
  ];
}

function numberSteps() {
  const layer = { input_shape: [1, 2, 4, 4], filter_shape: [3, 2, 2, 2] };
  const step = (element_, view, say, added) => ({ layer, element: element_, view, say, added });
  const value = (tensor, ...place) => long(number(tensor, 2, 1, place));
  return [
    step("dw=2,1,1,1", "planes", () => `dw[2,1,1,1] is ${value("dw", 1, 1)}. Where does this number come from?`),
    step("dw=2,1,1,1", "channels", () => "It is the gradient of one weight, w[2,1,1,1]. This weight multiplies elements of " +
      "channel 1 of x, and the products are added to channel 2 of y. So only x[1] and dy[2] contribute to it."),
    step("dw=2,1,1,1", "planes", () => `The output y[0,2,0,0] multiplies this weight by x[0,1,1,1] = ${value("x", 1, 1)}. ` +
      `If the weight grows by 1, this output grows by ${value("x", 1, 1)}. dy says how much the loss grows per unit of ` +
      `this output: dy[0,2,0,0] = ${value("dy", 0, 0)}. So the loss grows by ${long(products[0].product)}.`, 1),
    step("dw=2,1,1,1", "planes", () => "Every output of y[2] uses this weight once, so there are 3x3 products. Each one " +
      "multiplies an element of x by the element of dy at its output. Here are the first four.", 4),
    step("dw=2,1,1,1", "planes", () => `The 9 products add up to ${value("dw", 1, 1)}. The list shows all of them.`),
    step("dw=2,1,1,1", "planes", () => `Check the sum without a formula for the gradient. ${differenceText()}`),
    step("dx=0,1,2,1", "planes", () => "An element of dx is computed in the same way. Four windows of each of the 3 filters " +
      `read x[0,1,2,1], which gives ${plural(steps(), "product")}. ${differenceText()}`),
    step("dx=0,1,2,1", "channels", () => "The products come from a whole column, because all filters read channel 1 of x. " +
      "Now turn the knobs and choose any element. The page shows its products and its check."),
  ];
}

// Returns sentences on the change of the loss when 1 is added to x or w at the index of the chosen
// element of dx or dw; empty for elements of y and for layers with many products.
function differenceText() {
  const { data, problem } = scene;
  const result_ = called("y");
  if (!data || chosen.tensor === result_ || tensors.cost(problem).products > MOST_CHECKED) return "";
  const operand = called(called(chosen.tensor).slice(1)); // the gradient dx belongs to x
  const index = indexOf(chosen.tensor, chosen.k, chosen.c, at());
  const { loss = "dot" } = scene.knobs;
  const [before, more, less] = tensors.losses(problem, data, loss, operand, index,
    loss === "squares" ? [0, 1, -1] : [0, 1], result_, called("dy"));
  const [name, result] = [operand, chosen.tensor].map((tensor) => `${called(tensor)}[${index.join()}]`);
  const gradient = exactly(chosen.tensor, chosen.k, chosen.c, at()) ?? number(chosen.tensor, chosen.k, chosen.c, at());
  const size = products.reduce((sum, { product }) => sum + Math.abs(product ?? 0), Math.abs(gradient));
  const compared = (change) => long(change) === long(gradient) ? `${long(change)}, is ${result}.`
    : !Number.isFinite(gradient) ? `${long(change)}, is not ${result}, which overflows: ${long(gradient)}.`
    : Math.abs(change - gradient) <= 1e-6 * size ? `${long(change)}, is ${result} up to rounding: ${long(gradient)}.`
    : `${long(change)}, is not ${result}, which is ${long(gradient)}: the loss is so large that ` +
      "rounding hides its change.";
  if (loss === "squares")
    return `The loss, ${LOSSES[loss]}, is ${long(before)}. Add 1 to ${name}, and it becomes ${long(more)}; subtract 1 ` +
      `instead, and it becomes ${long(less)}. Half the difference, ${compared((more - less) / 2)}`;
  return `Add 1 to ${name} and run the forward pass again: the loss, ${LOSSES[loss]}, goes from ${long(before)} to ` +
    `${long(more)}. The difference, ${compared(more - before)}`;
}
const MOST_CHECKED = 300_000; // largest number of products of a forward pass that is run again

// Shows a step of a story.
function openStep(name, place) {
  const { title, steps: made } = STORIES[name];
  const all = made();
  place = Math.max(0, Math.min(place, all.length - 1));
  const { layer, element: element_, view, say, added } = all[place];
  story = { name, place, view };
  turn(knobsOf({ layer, values: "integers", seed: SEED }));
  const [tensor, index] = element_.split("=");
  visit(tensor, index.split(",").map(Number));
  stepTo(added ?? steps());
  document.querySelector("main").dataset.story = view;
  $("story").hidden = false;
  const shapes = [layer.input_shape, layer.filter_shape].map(shape_text);
  $("story-title").textContent = `${title} A small layer: ${shapes.join(" * ")}`;
  $("story-place").textContent = `Step ${story.place + 1} of ${all.length}`;
  $("tale").textContent = say();
  $("story-back").disabled = story.place === 0;
  $("story-next").textContent = story.place + 1 < all.length ? "Next" : "Turn the knobs";
}

function closeStory() {
  story = null;
  delete document.querySelector("main").dataset.story;
  $("story").hidden = true;
}

// Ends a story: on the knobs of its layer, or on the first layer.
function leave(layer) {
  closeStory();
  $("turn").open = true;
  turn(layer);
  $("dials").querySelector("input").focus();
}

function buildStories() {
  $("front").hidden = Boolean(original.noKnobs) || original.isTransposed; // the stories show convolutions
  for (const [name, { title }] of Object.entries(STORIES)) {
    const open = () => {
      openStep(name, 0);
      $("story-next").focus();
    };
    $("stories").append(buttonOf("", open, {}, title));
  }
  $("story-back").addEventListener("click", () => openStep(story.name, story.place - 1));
  $("story-next").addEventListener("click", () => {
    if ($("story-next").textContent === "Next") openStep(story.name, story.place + 1);
    else leave(knobs);
  });
  $("story-leave").addEventListener("click", () => leave(knobsOf(original.knobs)));
}

// Opens the story of an address such as #story=size,3.  Returns whether there was one.
function storyFromAddress(hash) {
  const [, name, place] = /^#story=(\w+)(?:,(\d+))?$/.exec(hash) ?? [];
  if (original.noKnobs || original.isTransposed || !Object.hasOwn(STORIES, name ?? "")) return false;
  openStep(name, (place ?? 1) - 1);
  return true;
}
