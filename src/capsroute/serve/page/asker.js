// Asks the server about a picture that keeps changing: never more than one request at a time, and
// always the newest picture next.

const PAUSE = 70; // ms between requests: a stroke's points come faster than an eye follows
const PATIENCE = 30_000; // ms for one answer
const RETRIED = [502, 503, 504]; // ours is 503; the others are a proxy's, of a server that restarts

export class Problem extends Error {
  constructor(message, retryAfter = 0) {
    super(message);
    this.retryAfter = retryAfter; // ms; 0: the same request would fail again
  }
}

export class Asker {
  // `ask()` resolves to an answer, or to null where there is nothing to ask
  constructor(ask, { onAnswer, onProblem }) {
    Object.assign(this, { ask, onAnswer, onProblem });
    this.changed = false;
    this.running = false;
    this.pictures = 0;
    addEventListener("online", () => this.wake?.());
  }

  // The picture has grown.
  change() {
    this.changed = true;
    if (!this.running) this.run();
  }

  // The picture is another one: what is still said of the one before is not told.
  replace() {
    this.pictures++;
    this.change();
  }

  async run() {
    this.running = true;
    while (this.changed) {
      this.changed = false;
      const started = performance.now();
      await this.askOnce();
      await this.sleep(PAUSE - (performance.now() - started));
    }
    this.running = false;
  }

  async askOnce() {
    const picture = this.pictures;
    try {
      const answer = await this.ask();
      if (answer && picture === this.pictures) this.onAnswer(answer);
    } catch (error) {
      if (picture !== this.pictures) return;
      const problem = error instanceof Problem ? error : new Problem(String(error));
      this.onProblem(problem);
      if (!problem.retryAfter) return;
      await this.sleep(problem.retryAfter);
      this.changed = true;
    }
  }

  sleep(ms) {
    return new Promise((resolve) => {
      this.wake = resolve;
      setTimeout(resolve, Math.max(0, ms));
    });
  }
}

// POST an image; the JSON answer, or a Problem in words that a visitor can use.
export async function post(path, image) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST",
      body: image,
      headers: { "content-type": image.type || "application/octet-stream" },
      signal: AbortSignal.timeout(PATIENCE),
    });
    if (response.ok) return await response.json();
  } catch (error) {
    throw error.name === "TimeoutError"
      ? new Problem("The server takes very long. Trying again…", 1000)
      : new Problem("The server cannot be reached. Is it still running? Trying again…", 2000);
  }
  if (RETRIED.includes(response.status)) {
    const seconds = Number(response.headers.get("retry-after")) || 1;
    throw new Problem("The server is busy. Trying again…", 1000 * seconds);
  }
  throw new Problem(sentence(await reason(response)));
}

async function reason(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + ".";
}
