// Of the modules that only a page that computes by itself carries.

interface Tensor { shape: number[]; data: Float32Array }
interface Rows { n: number; d: number; data: Float32Array }
/** What a pass is watched and changed by: every site of `ch.probe`, and the outputs of heads before W_o. */
interface Look { see?(site: string, value: Rows): void; change?(site: string, out: Rows, start: number): Rows }
interface KeyCache { [site: string]: {k: Rows; v: Rows} }

interface Pipeline {
  added: [string, number, boolean][];
  normal: {type: string; [field: string]: any}[];
  cuts: {type: string; [field: string]: any}[];
  model: {type: string; vocab: {[token: string]: number}; merges: [string, string][]; [field: string]: any};
  before: number[]; after: number[];
  back: {type: string; [field: string]: any}[];
}
interface LiveTokenizer { sides: {source: Pipeline; target?: Pipeline}; names: {[id: string]: string}; special: number[]; roles: {[role in 'bos' | 'eos' | 'pad' | 'unk' | 'mask']: number | null} }
/** What Python computed with this model: the page computes the same before it answers. */
interface Check { text: string; target: number[]; logits: number[] }
interface LiveModel {
  name: string; config: {[field: string]: any}; generation: {[field: string]: any}; tokenizer: LiveTokenizer;
  tensors: {name: string; shape: number[]; at: number; dtype: 'f4' | 'i1'}[]; limit: number; target_limit: number;
  weights: string; precision: string; texts: [string, number[]][]; check: Check;
}

interface Window { CLEARHEAD_MODEL?: LiveModel }
interface Pass { source: number[]; target: number[]; memory?: Rows; seen: Map<string, Rows>; states: Rows; change: Look['change'] }
type Computing = ReturnType<typeof import('./forward.js').makeModel>;
type Words = ReturnType<typeof import('./tokenizer.js').makeTokenizer>;
