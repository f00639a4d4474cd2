// What the modules of the page tell one another. Read by the type checker and by people, never by the browser.

type Value = string | number | boolean | null;
type Params = {[name: string]: unknown};

/** `head`: of an attention, or a neuron of a feed-forward layer; null: all of it. */
interface Change { site: string; head: number | null; how: 'zero' | 'mean' | 'patch' | 'scale' | 'steer'; by?: number }
interface Run { model: string; text: string; target: string | null; second: string | null; away?: string; changes: Change[] }

interface Attention { name: string; sites: string[]; n_heads: number[] }
interface Model {
  name: string; shape: 'decoder' | 'encoder' | 'encoder_decoder'; inputs: 'tokens' | 'patches' | 'frames';
  head: string | null; n_params: number; max_len: number; limit: number; attentions: Attention[];
  can: {[what: string]: boolean}; samples?: number; example: string; example_target: string | null; config: {[field: string]: any};
}

/** A packed answer, unpacked: its own fields, and its arrays with their shapes. */
interface Answer {
  arrays: {[name: string]: Float32Array | Int32Array | Uint8Array};
  shapes: {[name: string]: number[]};
  [field: string]: any;
}

interface Side { tokens: string[]; ids: number[]; kind: 'tokens' | 'patches' | 'frames'; grid?: [number, number]; special: number[] }
interface Guess { token?: string; label?: string; id: number; p: number }
interface Result { kind: 'next' | 'classes' | 'mask' | 'token' | 'translation' | 'states' | 'seen'; top: Guess[]; text?: string; words?: string; at?: number }
/** What the model was given, in tokens; `layers` while it still computes. */
interface Given extends Answer {
  source: Side; target: Side | null; target_text: string | null; truncated: boolean; layers?: {done: number, of: number};
}
/** The answer to `read`: what the model was given, and what it says. */
interface Reading extends Given {
  answer: Result; plain: Result | null;
  /** Of a model without a head: the cosines of its changed states with those before, and of their means. */
  moved: {mean: number | null; tokens: number[]} | null;
}

/** Everything a view is made of, kept in the address so that a view can be shared. */
interface State {
  get(key: string, otherwise?: string): string;
  number(key: string, otherwise: number): number;
  /** Null removes a key. Subscribers of a changed key hear of it at once. */
  set(values: {[key: string]: string | number | null}): void;
  /** The whole address. */
  all(): {[key: string]: string};
  /** Write the address now. */
  flush(): void;
  /** It ends when the node leaves the page. */
  subscribe(keys: string[], hear: () => void, node?: Node): void;
}

type Ink = CanvasRenderingContext2D;
type Box = HTMLElement;
type Numbers = ArrayLike<number>;
type Child = Node | string | null | undefined | false | 0;
/** Attributes; `on…` are listeners. */
interface Told {
  [name: string]: unknown;
  onkeydown?(event: KeyboardEvent): void; onclick?(event: Event): void; onsubmit?(event: Event): void; onfocusin?(event: Event): void;
  onpointerover?(event: Event): void; onpointermove?(event: PointerEvent): void;
}
type Edge = 'rows' | 'cols';
interface Place { side: 'source' | 'target'; at: number }

interface Page {
  state: State;
  models: Model[];
  /** The chosen model, its attention of this name (the first otherwise), and the run the address describes. */
  model(): Model;
  run(): Run;
  /** The tokens of this run; null until they are here. */
  given: Given | null;
  /** The last `read` of this run; null while the first is on its way or after it failed. */
  reading: Reading | null;
  /** One request. A newer one in the same lane makes an older one fail with AbortError: old never overwrites new. */
  ask(name: string, params: Params, lane?: string): Promise<Answer>;
  /** Ask, mark `box` busy, then show; a failure is shown in `box` in the server's words; a superseded request is silent.
   * While `show` answers true, more follows and the box stays busy. */
  load(box: HTMLElement, lane: string, name: string, params: Params, show: (answer: Answer) => unknown): Promise<void>;
  /** The token under the pointer or the keyboard: what the chosen head does there shades the strip. */
  focus(place: Place | null): void;
  onFocus(node: Node, hear: (place: Place | null) => void): void;
  /** Shade the tokens of a side by weights (0..1); null clears. */
  shade(side: 'source' | 'target', weights: ArrayLike<number> | null): void;
}

/** What is called after the model or the run changed and `page.reading` is new. */
type Update = (early?: boolean) => void;
interface PanelKind {
  id: string; name: string;
  /** True: the panel looks at the run, so the text, the tokens and the answer stand above it. */
  reads?: boolean;
  /** True: it has something to show before `page.reading` is here, and is told of a new run by `update(true)`. */
  early?: boolean;
  /** True: it shows the model with the run's changes though it does not read the run. */
  changed?: boolean;
  /** Whether a model that can these things has the panel; every model without it. */
  can?(can: Model['can']): boolean;
  panel(root: HTMLElement, page: Page): Update;
}

interface Figure {
  node: HTMLElement; canvas: HTMLCanvasElement; caption: HTMLElement; controls: HTMLElement;
  redraw(): void;
  /** A sentence on what is seen, and the rows of a table (the first 20 are shown). */
  say(summary: string, columns?: string[], rows?: (string | number)[][]): void;
}
interface FigureKind {
  /** What the picture is, for those who do not see it. */
  label: string;
  /** CSS pixels; a function of the width where it depends on it. */
  height: number | ((width: number) => number);
  /** The lines' names, which stand beside the canvas on the page and below it in a saved picture. */
  legend?(): {name: string, tint?: string, dash?: boolean}[];
  /** In CSS pixels; the canvas is clear and scaled. */
  draw(ink: Ink, width: number, height: number): void;
  /** The words of the tooltip at a place, or null; called from data already here. */
  hover?(x: number, y: number): string | null;
  leave?(): void;
  click?(x: number, y: number): void;
  /** With keys the canvas takes the keyboard's focus; true when the key was used. */
  keys?(key: string, event: KeyboardEvent): boolean;
}

/** Options as [value, words], or both in one. */
type Options = (string[] | string)[];
interface Series { name: string; x: ArrayLike<number>; y: ArrayLike<number>; dots?: boolean; dash?: boolean; fill?: boolean; colour?: number }
interface ChartKind {
  series: Series[]; x: {label: string; log?: boolean}; y: {label: string; log?: boolean; zero?: boolean};
  marks?: {x: number; label: string}[];
}
interface Chart extends Figure { show(kind: ChartKind): void }

interface Window {
  /** An exported page: answers by canonical key, base64 of the packed form. */
  CLEARHEAD_ANSWERS?: {[key: string]: string};
  /** A page that computes by itself: the requests it answers, and how its weights are kept. */
  CLEARHEAD_LOCAL?: {names: string[]; precision: string; answer(name: string, params: any): Answer};
  /** What an exported page or a notebook begins with: the address's keys, and which panels it has (all without it). */
  CLEARHEAD_START?: {state?: {[key: string]: string}; panels?: string[]; left_out?: string; live?: string};
}

interface Head { site: string; layer: number; head: number; scores: {[name: string]: number | null} | null; node: HTMLElement }
interface GridKind {
  label: string; pick(head: Head): void; filled?(heads: Head[], done: boolean): void; words?(head: Head): string; sorts: boolean;
}
interface Axis { to(value: number): number; ticks: number[] }
/** What a map shows, which tokens stand at its sides, and how its values are asked for; without `exact` it has no parts to ask for. */
interface Subject {
  title: string; rows: Place['side']; cols: Place['side']; hard: boolean;
  asked(box: number[] | null): [string, Params]; exact?(row: number): [string, Params];
}
/** A piece of a map: `box` in tokens, `by` tokens a value. */
interface Tile {
  box: number[]; rows: number; cols: number; by: [number, number];
  values: Float32Array; rowmax: Float32Array | null; picture: HTMLCanvasElement | null;
}
/** A token's chance before and after the filters. */
interface Choice { id: number; token: string; p_raw: number; p_final: number; removed_by: string | null }
/** A branch of beam search as it is told, and where it stands in the tree. */
interface Branch { token: string; parent: number; score: number | null; why?: string; wins?: boolean }
interface Leaf extends Branch { step: number; fate: 'kept' | 'finished' | 'dropped'; before: Leaf | null; x: number; y: number }
interface Positions { name: string; is_model: boolean; words: string }
/** How much of a picture is drawn by now, 0 to 1. */
interface Pace { shown(): number }
/** One step of following a token. */
interface Stop { name: string; title: string; words: string; equation: string; draw(box: HTMLElement, pace: Pace): void }
type Matrix = number[][];
interface Hand { q: Matrix; k: Matrix; v: Matrix }
/** Of a slider kept in the address: key, label, min, max, step, usual value. */
type Knob = [string, string, number, number, number, number];
/** A summand of a logit. */
interface Part { name: string; site: string | null; layer: number | null; head: number | null; value: number }
interface SignedKind {
  label: string; rows(): number; columns(): string[]; most(): number; value(r: number, c: number): number | null; words(r: number, c: number): string;
}
interface Effect { d_loss: number | null; d_logit: number | null }
