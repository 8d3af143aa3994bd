// Draws what the server answered. Every class keeps its colour for as long as it is in the answer.

const SVG = "http://www.w3.org/2000/svg";
const SLOTS = 4; // colours in style.css
const RANKED = 6; // bars of classes with long names
const TILE = 288; // pixels of a heat map's canvas
const THUMB = 44;
const LEVEL = 96; // from one level of a tree to the next
const GAP = 12;
const SHARE = 32; // wide: the text beside a capsule that has others under it
const LETTER = 11; // wide, in the name at the top of a tree
const LETTERS = 24; // of it at most, which a phone's width holds
const LEAST = 240; // wide, for a name above few leaves

const slots = new Map();

function colourOf(label, labels) {
  for (const old of slots.keys()) if (!labels.includes(old)) slots.delete(old);
  if (!slots.has(label)) {
    const taken = new Set(slots.values());
    const free = [...Array(SLOTS).keys()].find((slot) => !taken.has(slot));
    slots.set(label, free ?? slots.size % SLOTS);
  }
  return `var(--class-${slots.get(label)})`;
}

export function percent(share) {
  return `${share < 1 ? Math.min(99, Math.round(100 * share)) : 100}\u202f%`; // a narrow space that holds
}

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function showLabels(element, labels, model) {
  element.className = "labels";
  element.classList.toggle("words", labels.some((label) => label.length > 2));
  element.classList.toggle("none", labels.length === 0);
  if (labels.length === 0) {
    element.replaceChildren(`no class reaches ${percent(0.5)}`);
    return;
  }
  const shown = model.digits ? [...labels].sort() : labels;
  element.replaceChildren(
    ...shown.flatMap((label, index) => {
      const name = make("b", { textContent: label });
      name.style.color = colourOf(label, labels);
      return [...joint(index, shown.length), name];
    }),
  );
}

// What stands before a label: 1, 3 and 7.
function joint(index, count) {
  if (index === 0) return [];
  if (index < count - 1) return [", "];
  return [" ", make("span", { className: "and", textContent: "and" }), " "];
}

// Short names stand side by side in their own order, so that nothing jumps; others are ranked.
function areUpright(model) {
  return model.class_names.length <= 12 && model.class_names.every((name) => name.length <= 2);
}

export function countBars(model) {
  return areUpright(model) ? model.class_names.length : Math.min(RANKED, model.class_names.length);
}

export function showBars(element, prediction, model) {
  const upright = areUpright(model);
  element.className = `bars ${upright ? "upright" : "lying"}${model.multilabel ? " multi" : ""}`;
  const shares = new Map(prediction.ranked.map(({ label, probability }) => [label, probability]));
  const names = upright ? model.class_names : prediction.ranked.map(({ label }) => label);
  while (element.children.length > names.length) element.lastChild.remove();
  names.forEach((name, index) => {
    const bar = element.children[index] ?? element.appendChild(emptyBar());
    fillBar(bar, name, shares.get(name) ?? 0, prediction.labels);
  });
}

function emptyBar() {
  const track = make("div", { className: "track" }, make("div", { className: "fill" }));
  return make("li", {}, make("span", { className: "name" }), track, make("span", { className: "share" }));
}

function fillBar(bar, name, share, labels) {
  const [title, track, text] = bar.children;
  title.textContent = title.title = name;
  text.textContent = share < 0.005 ? "" : percent(share);
  track.firstChild.style.setProperty("--share", share);
  const chosen = labels.includes(name);
  bar.classList.toggle("chosen", chosen);
  if (chosen) bar.style.setProperty("--colour", colourOf(name, labels));
}

// The answer with its pictures decoded, so that all of it can be shown at once.
export async function decode(answer) {
  const sources = answer.explanation ? [answer.image, ...answer.explanation.classes.map(({ heat }) => heat)] : [];
  const images = await Promise.all(sources.map(async (source) => [source, await load(source)]));
  return { ...answer, decoded: new Map(images) };
}

async function load(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  return image;
}

// Digits stand in their own order wherever they are shown; other classes most likely first.
function ordered(classes, model) {
  return model.digits ? classes.toSorted((one, other) => one.index - other.index) : classes;
}

// What the model saw, then for each class the same, dimmed, under the heat in the class's colour.
export function showHeat(element, answer, model) {
  const picture = answer.decoded.get(answer.image);
  const tiles = [makeTile(picture, "what the model saw")];
  for (const one of ordered(answer.explanation.classes, model)) {
    const name = make("b", { textContent: one.name });
    const caption = one.rival === null ? ["evidence for ", name] : [name, ` rather than ${one.rival}`];
    const tile = makeTile(picture, ...caption);
    const colour = colourOf(one.name, answer.explanation.predicted);
    tile.style.setProperty("--colour", colour);
    paintHeat(tile.firstChild, answer.decoded.get(one.heat), styleOf(colour));
    tiles.push(tile);
  }
  arrange(element, tiles);
}

// Three to a row, or four where that leaves less of the last row empty.
function arrange(element, tiles) {
  const empty = (columns) => (columns - (tiles.length % columns)) % columns;
  element.classList.toggle("four", empty(4) < empty(3));
  element.replaceChildren(...tiles);
}

// Before there is anything to show: as many tiles, as large.
export function showNoHeat(element, model) {
  const [height, width] = model.image_size;
  const empty = () => make("figure", { ariaHidden: "true" }, make("canvas", { className: "unused", width, height }), make("figcaption", {}, "\u00a0"));
  arrange(element, [empty(), empty(), ...(model.multilabel ? [empty()] : [])]);
}

function makeTile(picture, ...caption) {
  const canvas = make("canvas", { width: TILE, height: Math.round((TILE * picture.height) / picture.width) });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  const figure = make("figure", {}, canvas, make("figcaption", {}, ...caption));
  canvas.role = "img";
  canvas.ariaLabel = figure.textContent;
  return figure;
}

// `var(--class-0)` as canvas wants it
function styleOf(colour) {
  const name = colour.slice(4, -1);
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function paintHeat(canvas, heat, colour) {
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(0 0 0 / .5)";
  context.fillRect(0, 0, canvas.width, canvas.height);
  const tint = new OffscreenCanvas(heat.width, heat.height);
  const ink = tint.getContext("2d");
  ink.drawImage(heat, 0, 0);
  ink.drawImage(heat, 0, 0); // twice: weak heat shows too
  ink.globalCompositeOperation = "source-in"; // its opacity is the heat; the colour is ours
  ink.fillStyle = colour;
  ink.fillRect(0, 0, tint.width, tint.height);
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(tint, 0, 0, canvas.width, canvas.height);
}

export function showTrees(element, answer, model) {
  const { classes, links, predicted } = answer.explanation;
  element.replaceChildren(
    ...ordered(classes, model).map((one) => {
      const own = links.filter((link) => link.class_index === one.index);
      const drawn = drawTree(one, own, answer.image, model.image_size);
      const tree = make("figure", {}, make("div", { className: "scroll" }, drawn), make("figcaption", { textContent: `${one.caption}.` }));
      tree.style.setProperty("--colour", colourOf(one.name, predicted));
      return tree;
    }),
  );
  // its top first, where a tree is wider than the screen
  for (const box of element.querySelectorAll(".scroll")) box.scrollLeft = (box.scrollWidth - box.clientWidth) / 2;
}

// Links come parents first; each carries the capsule at either end.
function grow(links) {
  const key = ({ layer, row, column, capsule }) => [layer, row, column, capsule].join();
  const nodeOf = (capsule, link) => ({ capsule, link, children: [] });
  const root = nodeOf(links[0].parent, null);
  const latest = new Map([[key(root.capsule), root]]);
  for (const link of links) {
    const parent = latest.get(key(link.parent));
    const child = nodeOf(link.child, link);
    parent.children.push(child);
    latest.set(key(link.child), child);
  }
  return root;
}

function place(node, level, state) {
  node.y = level * LEVEL;
  if (node.children.length === 0) {
    node.x = state.leaves++ * (THUMB + GAP) + THUMB / 2;
    state.right = Math.max(state.right, node.x + THUMB / 2);
  } else {
    for (const child of node.children) place(child, level + 1, state);
    node.x = (node.children[0].x + node.children.at(-1).x) / 2;
    if (node.link) state.right = Math.max(state.right, node.x + THUMB / 2 + SHARE);
  }
  state.depth = Math.max(state.depth, level);
}

function drawTree(one, links, picture, size) {
  if (links.length === 0) return make("p", { className: "empty", textContent: `Nothing spoke for ${one.name}.` });
  const root = grow(links);
  const state = { leaves: 0, depth: 0, right: 0 };
  place(root, 0, state);
  const width = Math.max(state.right, LEAST);
  const left = (state.right - width) / 2;
  const height = state.depth * LEVEL + THUMB + 18;
  const svg = draw("svg", { viewBox: `${left} 0 ${width} ${height}`, role: "img", "aria-label": describe(one, root) });
  svg.style.maxWidth = `${1.6 * width}px`; // thumbnails as large as they are sharp
  svg.style.minWidth = `${0.7 * width}px`; // and as small as they can be told apart
  drawLinks(svg, root);
  svg.append(crown(root, one, 2 * Math.min(root.x - left, left + width - root.x)));
  for (const child of root.children) drawNodes(svg, child, picture, size);
  return svg;
}

function describe(one, root) {
  const shares = root.children.map(({ link }) => percent(link.share)).join(", ");
  return `Parse tree of ${one.name}: its strongest capsules gave ${shares} of the evidence`;
}

function drawLinks(svg, node) {
  for (const child of node.children) {
    const [top, bottom] = [node.y + THUMB, child.y];
    const middle = (top + bottom) / 2;
    const path = `M${node.x} ${top}C${node.x} ${middle} ${child.x} ${middle} ${child.x} ${bottom}`;
    const { share, coefficient } = child.link;
    const title = draw("title", {}, `${percent(share)} of the evidence, routed here ${percent(coefficient)}`);
    const look = { class: "link", d: path, "stroke-width": 1 + 11 * share, opacity: 0.3 + 0.7 * coefficient };
    svg.append(draw("path", look, title));
    drawLinks(svg, child);
  }
}

function drawNodes(svg, node, picture, size) {
  svg.append(thumb(node, picture, size), shareText(node));
  for (const child of node.children) drawNodes(svg, child, picture, size);
}

// Under a leaf; beside a capsule that has lines under it.
function shareText(node) {
  const below = node.children.length === 0;
  const place = below ? { x: node.x, y: node.y + THUMB + 13 } : { x: node.x + THUMB / 2 + 5, y: node.y + THUMB / 2 + 4 };
  return draw("text", { class: below ? "share below" : "share", ...place }, percent(node.link.share));
}

// The class, with as much of its name as there is room for; all of it stands under the tree.
function crown(node, { name }, room) {
  const most = Math.min(LETTERS, Math.floor((room - 24) / LETTER));
  const text = name.length > most ? `${name.slice(0, most - 1)}…` : name;
  const wide = Math.max(THUMB, LETTER * text.length + 24);
  const body = { class: "root", x: node.x - wide / 2, y: node.y, width: wide, height: THUMB, rx: THUMB / 2 };
  const place = { class: "root-name", x: node.x, y: node.y + THUMB / 2, "font-size": text.length > 2 ? 16 : 26 };
  return draw("g", {}, draw("title", {}, name), draw("rect", body), draw("text", place, text));
}

// The whole picture, faint, with what the capsule sees (or where it sits) in full light.
function thumb(node, picture, [rows, columns]) {
  const [top, left, bottom, right] = node.capsule.shown;
  const [width, height] = [right - left, bottom - top];
  const whole = { href: picture, width: columns, height: rows };
  const seen = draw(
    "svg",
    { x: left, y: top, width, height, viewBox: `${left} ${top} ${width} ${height}` },
    draw("rect", { class: "ground", x: left, y: top, width, height }),
    draw("image", whole),
  );
  const { layer, row, column, capsule } = node.capsule;
  const name = layer ? `capsule layer ${layer}` : "primary capsules";
  return draw(
    "svg",
    { x: node.x - THUMB / 2, y: node.y, width: THUMB, height: THUMB, viewBox: `0 0 ${columns} ${rows}` },
    draw("title", {}, `${name}, capsule ${capsule} at row ${row}, column ${column}`),
    draw("rect", { class: "ground", width: columns, height: rows }),
    draw("image", { ...whole, opacity: 0.35 }),
    seen,
    draw("rect", { class: "frame", x: left, y: top, width, height, "stroke-width": 1.5 }),
  );
}

export function showRouting(element, { layers, notes }) {
  const rounds = Math.max(...layers.map((layer) => layer.entropy.length));
  const heads = ["layer", ...Array.from({ length: rounds }, (_, index) => `iteration ${index + 1}`), "never win"];
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col", textContent: text }))));
  const rows = layers.toReversed().map((layer) => {
    const cells = layer.entropy.map((value, index) => {
      const text = value.toFixed(2);
      return index < layer.used
        ? make("td", { textContent: text })
        : make("td", { textContent: `(${text})`, className: "unused" });
    });
    const never = layer.never_win === null ? "–" : percent(layer.never_win);
    return make("tr", {}, make("th", { scope: "row", textContent: layer.name }), ...cells, make("td", { textContent: never }));
  });
  const meaning =
    "Entropy of the routing coefficients: 1 shares a capsule evenly among all parents, 0 gives it to one. " +
    "In parentheses: iterations that never reach the answer. ";
  element.replaceChildren(
    make("div", { className: "scroll" }, make("table", {}, head, make("tbody", {}, ...rows))),
    make("p", { className: "caption", textContent: meaning + notes.join(" ") }),
  );
}
