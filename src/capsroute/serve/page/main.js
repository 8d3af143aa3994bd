// The page: a sketch, a server that is asked about it, and what it answered.

import { Asker, post, Problem } from "./asker.js";
import { strokesOf } from "./digits.js";
import { Sketch } from "./sketch.js";
import { countBars, decode, percent, showBars, showHeat, showLabels, showNoHeat, showRouting, showTrees } from "./view.js";

const DIGIT_HEIGHT = 19;
const SPEAK_AFTER = 600; // ms without a change
const PEN_KEYS = [" ", "Enter"];
const INVITE = {
  true: "Draw a digit here, then a second one over it",
  false: "Drop, paste or choose an image",
};
const HOW_TO = {
  true: "Mouse, finger or pen. With the keyboard: arrow keys move, Space puts the pen down and lifts it, Shift is faster.",
  false: "Drop a file anywhere on this page, paste one, or choose it.",
};

const $ = (id) => document.getElementById(id);
const model = await about();
const sketch = new Sketch($("sketch"), {
  height: model.image_size[0],
  width: model.image_size[1],
  drawable: model.digits,
  onChange: changed,
});
const asker = new Asker(ask, { onAnswer: show, onProblem: tell });
const path = `${model.explainable ? "/explain" : "/predict"}?top_k=${countBars(model)}`;
let speaking;
let turn = 0;

start();

async function about() {
  try {
    const response = await fetch("/model");
    if (!response.ok) throw new Error(`/model answered ${response.status}`);
    return await response.json();
  } catch (error) {
    tell(new Problem("The server cannot be reached. Reload this page to try again."));
    throw error;
  }
}

function start() {
  const numbers = [
    model.title,
    model.parameters && `${model.parameters.toLocaleString("en")} parameters`,
    model.iterations && `${model.iterations} routing iteration${model.iterations === 1 ? "" : "s"}`,
  ];
  $("about").textContent = numbers.filter(Boolean).join(" · ");
  document.title = `capsroute: ${model.title}`;
  $("invite").textContent = INVITE[model.digits];
  $("how-to").textContent = HOW_TO[model.digits];
  $("stage").classList.toggle("drawable", model.digits);
  if (model.digits) {
    // an application's arrow keys are its own: a screen reader leaves them to the pen
    Object.assign($("sketch"), { tabIndex: 0, role: "application", ariaLabel: "Drawing area" });
  }
  $("stage").style.aspectRatio = `${model.image_size[1]} / ${model.image_size[0]}`;
  $("example").hidden = !model.digits;
  $("heat").hidden = !model.explainable;
  $("unexplained").hidden = model.explainable;
  $("unexplained").textContent = `This model cannot be explained: ${model.unexplained}.`;
  $("file").accept = model.limits.formats.map((format) => `image/${format.toLowerCase()}`).join();
  listen();
  reset();
}

function listen() {
  $("sketch").addEventListener("pointerdown", takeTurn, { capture: true });
  $("sketch").addEventListener("keydown", ({ key }) => PEN_KEYS.includes(key) && takeTurn(), { capture: true });
  $("undo").onclick = undo;
  $("clear").onclick = clear;
  $("invert").onclick = () => sketch.invert();
  $("example").onclick = drawExample;
  $("choose").onclick = () => $("file").click();
  $("file").onchange = () => {
    take($("file").files[0]);
    $("file").value = ""; // so that the same file can be chosen again
  };
  addEventListener("paste", (event) => take(imageIn(event.clipboardData)));
  addEventListener("dragenter", (event) => ($("drop").hidden = !event.dataTransfer.types.includes("Files")));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("dragleave", (event) => event.relatedTarget ?? ($("drop").hidden = true));
  addEventListener("drop", (event) => {
    event.preventDefault();
    $("drop").hidden = true;
    take(imageIn(event.dataTransfer));
  });
  addEventListener("keydown", (event) => {
    if (event.key === "z" && (event.ctrlKey || event.metaKey) && !sketch.empty) undo();
  });
}

function undo() {
  takeTurn();
  sketch.undo();
}

function clear() {
  takeTurn();
  sketch.clear();
}

function imageIn(transfer) {
  return [...(transfer?.files ?? [])].find((file) => file.type.startsWith("image/")) ?? transfer?.files?.[0];
}

async function take(file) {
  if (!file) return;
  const mine = takeTurn();
  if (file.size > model.limits.upload_bytes) {
    const most = (model.limits.upload_bytes / 2 ** 20).toLocaleString("en");
    return tell(new Problem(`That file is too large: at most ${most} MiB are taken.`));
  }
  try {
    const image = await createImageBitmap(file);
    if (mine !== turn) return; // another file, or a stroke, came while this one was read
    reset();
    sketch.put(image, file);
  } catch {
    if (mine === turn) tell(new Problem(`That is no image this browser can show; expected ${model.limits.formats.join(", ")}.`));
  }
}

function changed(grown) {
  if (!grown) tell(null); // what went wrong while one drew stands until there is an answer
  const focused = document.activeElement;
  $("undo").disabled = $("clear").disabled = sketch.empty;
  // one in the other's place, so that the row stays a row
  $("invert").hidden = !(model.digits && sketch.shownImage);
  $("example").hidden = !(model.digits && !sketch.shownImage);
  // a button that can no longer be pressed would take the focus with it
  if (focused.disabled || focused.hidden) $(model.digits ? "sketch" : "choose").focus({ preventScroll: true });
  $("stage").classList.toggle("busy", !sketch.empty);
  if (sketch.empty) reset();
  if (grown) asker.change();
  else asker.replace();
}

async function ask() {
  return sketch.empty ? null : decode(await post(path, await sketch.file()));
}

// Before the first answer everything stands where it will stand.
function reset() {
  clearTimeout(speaking);
  const zero = { labels: [], ranked: model.class_names.slice(0, countBars(model)).map((label) => ({ label, probability: 0 })) };
  showBars($("bars"), zero, model);
  for (const bar of $("bars").querySelectorAll(".share")) bar.textContent = "";
  $("labels").className = "labels none";
  $("labels").textContent = model.digits ? "waiting for a digit" : "waiting for an image";
  $("caption").textContent = "";
  $("spoken").textContent = "";
  showNoHeat($("heat"), model);
  $("trees").replaceChildren();
  $("tree-section").hidden = $("routing-section").hidden = true;
}

function show(answer) {
  tell(null);
  const prediction = answer.prediction ?? answer;
  showLabels($("labels"), prediction.labels, model);
  showBars($("bars"), prediction, model);
  $("caption").textContent = captionOf(prediction);
  speak(prediction);
  if (!answer.explanation) return;
  $("tree-section").hidden = $("routing-section").hidden = false;
  showTrees($("trees"), answer, model);
  showRouting($("routing"), answer.explanation);
  $("levels").textContent = answer.explanation.layers.slice(0, -1).toReversed().map(({ name }) => `${name}, then `).join("");
  $("patches").textContent = answer.explanation.patches;
  showHeat($("heat"), answer, model);
}

function captionOf({ labels, ranked, remark }) {
  if (remark) return `${remark.charAt(0).toUpperCase()}${remark.slice(1)}.`;
  if (labels.length) return "";
  return `Most likely: ${ranked[0].label} (${percent(ranked[0].probability)}).`;
}

// Told to screen readers once the hand rests, not at every point of a stroke.
function speak({ labels, ranked }) {
  clearTimeout(speaking);
  const shares = new Map(ranked.map(({ label, probability }) => [label, probability]));
  const share = (label) => (shares.has(label) ? `, ${percent(shares.get(label))}` : ""); // has none beyond the bars
  const text = labels.map((label) => label + share(label)).join("; ") || `No class reaches ${percent(0.5)}`;
  speaking = setTimeout(() => ($("spoken").textContent = `Answer: ${text}`), SPEAK_AFTER);
}

function tell(problem) {
  const message = problem?.message ?? "";
  if ($("problem").textContent === message) return; // an alert that is written again is read out again
  $("problem").hidden = !problem;
  $("problem").textContent = message;
}

// Whoever changes the picture takes the turn: an example under way and a file being read end.
function takeTurn() {
  return ++turn;
}

// Two digits, written as by a hand, so that the page shows what it does before one draws.
async function drawExample() {
  const mine = takeTurn();
  const [height, width] = model.image_size;
  const [first, second] = shuffled(model.class_names);
  const shift = () => (Math.random() - 0.5) * 2.4;
  const digits = model.multilabel
    ? [strokesOf(first, width / 2 - 3 + shift(), height / 2 + shift(), DIGIT_HEIGHT),
       strokesOf(second, width / 2 + 3 + shift(), height / 2 + shift(), DIGIT_HEIGHT)]
    : [strokesOf(first, width / 2, height / 2, DIGIT_HEIGHT)];
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  sketch.clear();
  for (const [start, ...others] of digits.flat()) {
    const stroke = sketch.begin(start);
    for (const point of others) {
      if (!still) await new Promise((resolve) => setTimeout(resolve, 35));
      if (mine !== turn) return;
      sketch.extend(stroke, [point]);
    }
  }
}

function shuffled(list) {
  return list.map((item) => [Math.random(), item]).sort(([a], [b]) => a - b).map(([, item]) => item);
}
