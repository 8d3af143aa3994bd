// The picture: strokes and images in the model's own pixels, drawn with pointer or keyboard.

const PEN = 2.5; // pixels; MNIST's ones are 2.6 wide
// MNIST leaves so much free around a digit, and people fill what they draw on: it is not shown
const MARGIN = 4;
const FINE = 8; // strokes are drawn this much finer, then averaged to the model's pixels
const INK = "#fff";
const GROUND = "#000";
const STEP = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const FAST = 4; // with Shift

export class Sketch {
  constructor(canvas, { width, height, drawable, onChange }) {
    Object.assign(this, { canvas, width, height, drawable, onChange });
    this.items = []; // {points} or {image, file, inverted}, oldest first
    this.cursor = [width / 2, height / 2];
    this.cursorShown = false;
    this.pointer = null; // the id of the one that draws
    this.keyStroke = null; // the stroke that the keyboard draws
    this.fine = new OffscreenCanvas(width * FINE, height * FINE);
    this.coarse = new OffscreenCanvas(width, height);
    new ResizeObserver(() => this.show()).observe(canvas);
    if (drawable) {
      this.listenToPointer();
      this.listenToKeys();
    }
  }

  get empty() {
    return this.items.length === 0;
  }

  get penDown() {
    return this.items.includes(this.keyStroke);
  }

  get shownImage() {
    return this.items.findLast((item) => item.image);
  }

  undo() {
    this.items.pop();
    this.changed();
  }

  clear() {
    this.items = [];
    this.changed();
  }

  put(image, file) {
    this.items = [{ image, file, inverted: false }];
    this.changed();
  }

  invert() {
    const item = this.shownImage;
    if (item) item.inverted = !item.inverted;
    this.changed();
  }

  begin(point) {
    const stroke = { points: [point] };
    this.items.push(stroke);
    this.changed({ grown: true });
    return stroke;
  }

  // Nothing, if the stroke was taken back while the hand was still at it.
  extend(stroke, points) {
    if (!this.items.includes(stroke)) return;
    stroke.points.push(...points);
    this.changed({ grown: true });
  }

  // `grown`: by a stroke, everything else as before
  changed({ grown = false } = {}) {
    this.show();
    this.onChange(grown);
  }

  // What is sent: an image as it came, as long as nothing was done to it; else the model's pixels.
  async file() {
    const [first, ...others] = this.items;
    if (first.image && !first.inverted && others.length === 0) return first.file;
    this.drawCoarse();
    return this.coarse.convertToBlob({ type: "image/png" });
  }

  drawCoarse() {
    this.paint(this.fine, FINE, 0, 0);
    const { width, height } = this;
    const source = this.fine.getContext("2d").getImageData(0, 0, width * FINE, height * FINE).data;
    const context = this.coarse.getContext("2d");
    const target = context.createImageData(width, height);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const at = 4 * (y * width + x);
        const sums = blockSums(source, x * FINE, y * FINE, width * FINE);
        sums.forEach((sum, channel) => (target.data[at + channel] = Math.round(sum / FINE ** 2)));
        target.data[at + 3] = 255;
      }
    }
    context.putImageData(target, 0, 0);
  }

  // The part of the picture that the canvas shows, in the model's pixels.
  get window() {
    const margin = this.drawable && !this.shownImage ? MARGIN : 0;
    return { margin, across: this.width - 2 * margin, down: this.height - 2 * margin };
  }

  show() {
    const { canvas } = this;
    const { margin, across, down } = this.window;
    const width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
    const height = Math.max(1, Math.round((width * down) / across));
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = this.paint(canvas, width / across, margin, margin);
    if (this.cursorShown) paintCursor(context, this.cursor, this.penDown);
  }

  paint(canvas, scale, left, top) {
    const context = canvas.getContext("2d", { willReadFrequently: canvas === this.fine });
    context.setTransform(scale, 0, 0, scale, -left * scale, -top * scale);
    context.fillStyle = GROUND;
    context.fillRect(0, 0, this.width, this.height);
    for (const item of this.items) {
      if (item.image) paintImage(context, item, this.width, this.height);
      else paintStroke(context, item.points);
    }
    return context;
  }

  listenToPointer() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => {
      // a second finger, or the palm beside a pen, draws nothing
      if (event.button !== 0 || this.pointer !== null) return;
      canvas.setPointerCapture(event.pointerId);
      this.pointer = event.pointerId;
      this.cursorShown = false;
      this.keyStroke = null;
      const stroke = this.begin(this.pointOf(event));
      const move = (next) => {
        if (next.pointerId !== this.pointer) return;
        const all = next.getCoalescedEvents?.() ?? [];
        this.extend(stroke, (all.length ? all : [next]).map((one) => this.pointOf(one)));
      };
      const end = (last) => {
        if (last.pointerId !== this.pointer) return;
        this.pointer = null;
        canvas.removeEventListener("pointermove", move);
        canvas.removeEventListener("lostpointercapture", end);
      };
      canvas.addEventListener("pointermove", move);
      canvas.addEventListener("lostpointercapture", end); // comes after up and after cancel
    });
  }

  pointOf(event) {
    const box = this.canvas.getBoundingClientRect();
    const { margin, across, down } = this.window;
    return [
      margin + ((event.clientX - box.left) / box.width) * across,
      margin + ((event.clientY - box.top) / box.height) * down,
    ];
  }

  listenToKeys() {
    this.canvas.addEventListener("keydown", (event) => {
      if (event.altKey || event.metaKey || event.ctrlKey) return;
      const step = STEP[event.key];
      if (step) this.moveCursor(step, event.shiftKey ? FAST : 1);
      else if (event.key === " " || event.key === "Enter") this.togglePen();
      else return;
      event.preventDefault();
    });
    this.canvas.addEventListener("blur", () => {
      this.cursorShown = false;
      this.keyStroke = null;
      this.show();
    });
  }

  moveCursor([right, down], by) {
    const { margin } = this.window;
    const [x, y] = this.cursor;
    this.cursor = [
      within(x + right * by, margin, this.width - margin),
      within(y + down * by, margin, this.height - margin),
    ];
    this.cursorShown = true;
    if (this.penDown) this.extend(this.keyStroke, [this.cursor]);
    else this.show();
  }

  togglePen() {
    this.cursorShown = true;
    this.keyStroke = this.penDown ? null : this.begin(this.cursor);
    this.show();
  }
}

function within(value, least, most) {
  return Math.min(most, Math.max(least, value));
}

function blockSums(source, left, top, stride) {
  const sums = [0, 0, 0];
  for (let y = top; y < top + FINE; y++) {
    for (let x = left; x < left + FINE; x++) {
      for (let channel = 0; channel < 3; channel++) sums[channel] += source[4 * (y * stride + x) + channel];
    }
  }
  return sums;
}

// Covers the picture, its middle in the middle, as the model's own preparation does.
function paintImage(context, { image, inverted }, width, height) {
  const scale = Math.max(width / image.width, height / image.height);
  const [across, down] = [image.width * scale, image.height * scale];
  context.fillStyle = "#fff"; // under what is transparent
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(image, (width - across) / 2, (height - down) / 2, across, down);
  if (!inverted) return;
  context.globalCompositeOperation = "difference";
  context.fillRect(0, 0, width, height);
  context.globalCompositeOperation = "source-over";
}

function paintStroke(context, [start, ...others]) {
  context.strokeStyle = INK;
  context.lineWidth = PEN;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  context.moveTo(...start);
  // through the middles of its segments, so that a hand's corners come out round
  others.forEach(([x, y], index) => {
    const [nextX, nextY] = others[index + 1] ?? [x, y];
    context.quadraticCurveTo(x, y, (x + nextX) / 2, (y + nextY) / 2);
  });
  if (others.length === 0) context.lineTo(...start);
  context.stroke();
}

function paintCursor(context, [x, y], down) {
  context.beginPath();
  context.arc(x, y, 1.4, 0, 2 * Math.PI);
  context.lineWidth = 0.3;
  context.strokeStyle = "#7db4ff";
  context.fillStyle = "rgb(125 180 255 / .75)";
  if (down) context.fill();
  context.stroke();
}
