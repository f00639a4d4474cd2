/** The one way to an answer: from the server, or from the answers an exported page carries. */

import {asks} from './draw.js';

const KEPT = 240;
/** @type {Map<string, Answer>} in order of use */
const kept = new Map();
/** @type {Map<string, AbortController>} */
const lanes = new Map();
const secret = takeKey();

/** The same string Python makes: the name, then JSON with sorted keys and no blanks.
 * @param {string} name @param {Params} params */
export function canonical(name, params) {
  /** @param {any} value @returns {any} */
  const sorted = (value) => {
    if (Array.isArray(value)) return value.map(sorted);
    if (value === null || typeof value !== 'object') return value;
    return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
  };
  return name + JSON.stringify(sorted(params));
}

/** The packed form: u32 length, JSON, then arrays; each array is a view, nothing is copied.
 * @param {ArrayBuffer} buffer @returns {Answer} */
export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const told = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  /** @type {Answer} */
  const answer = {...told, arrays: {}, shapes: {}};
  for (const [name, {dtype, shape, at}] of Object.entries(told.arrays ?? {})) {
    const Kind = dtype === 'u1' ? Uint8Array : dtype === 'i4' ? Int32Array : Float32Array;
    answer.arrays[name] = new Kind(buffer, 4 + length + at, shape.reduce((a = 0, b = 0) => a * b, 1));
    answer.shapes[name] = shape;
  }
  return answer;
}

/** @type {Page['ask']} */
export async function ask(name, params, lane) {
  const control = new AbortController();
  if (lane) {
    lanes.get(lane)?.abort();
    lanes.set(lane, control);
  }
  const key = canonical(name, params);
  // A measured time is a new answer each time; all others depend on the request alone.
  const found = name !== 'measure' && kept.get(key);
  const answer = found || (await answered(name, params, key, control.signal));
  control.signal.throwIfAborted();
  kept.delete(key);
  // Of an unfinished run more is known a moment later.
  if (!answer.layers && name !== 'export') kept.set(key, answer);
  if (kept.size > KEPT) kept.delete([...kept.keys()][0]);
  return answer;
}

/** From the server; in an exported page from the answers it holds, or computed here. @param {string} name @param {Params} params @param {AbortSignal} signal */
async function answered(name, params, key = '', signal) {
  if (!window.CLEARHEAD_ANSWERS) return unpack(await send(name, JSON.stringify(params), 'application/json', signal));
  if (!window.CLEARHEAD_LOCAL?.names.includes(name)) return unpack(embedded(key));
  // What made way for a newer request meanwhile is not computed at all.
  await new Promise((go) => setTimeout(go));
  signal.throwIfAborted();
  return window.CLEARHEAD_LOCAL.answer(name, params);
}

/** Whether there is an answer: always from a server, in an exported page where it holds or computes it. @param {string} name @param {Params} params */
export const has = (name, params) => asks(name) || canonical(name, params) in (window.CLEARHEAD_ANSWERS ?? {});

/** Whether a request only made way for a newer one. @param {unknown} error */
export const isOld = (error) => error instanceof DOMException && error.name === 'AbortError';

/** Send a picture or a sound. @param {Blob} body @returns {Promise<Answer>} */
export async function upload(name = '', body) {
  if (window.CLEARHEAD_ANSWERS) throw new Error('This exported page takes no uploads; run clearhead explore.');
  return unpack(await send(name, body, 'application/octet-stream'));
}

function embedded(key = '') {
  const text = window.CLEARHEAD_ANSWERS?.[key];
  if (text === undefined) throw new Error('Not in this exported page; run clearhead explore to ask the model itself.');
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}

/** @param {string | Blob} body @param {AbortSignal} [signal] */
async function send(name = '', body, kind = '', signal) {
  /** @type {Record<string, string>} */
  const headers = {'Content-Type': kind};
  if (secret) headers.Authorization = `Bearer ${secret}`;
  /** @type {Response} */
  let response;
  try {
    response = await fetch(`explore/${name}`, {method: 'POST', body, headers, signal});
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error('The server does not answer. Is clearhead still running?');
  }
  if (response.ok) return response.arrayBuffer();
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `The server answered ${response.status} ${response.statusText}`);
}

/** The key is taken out of the address, so that a shared view does not carry it. */
function takeKey() {
  const told = new URLSearchParams(location.hash.slice(1));
  const key = told.get('key');
  try {
    if (key === null) return sessionStorage.getItem('clearhead-key');
    sessionStorage.setItem('clearhead-key', key);
    told.delete('key');
    history.replaceState(null, '', '#' + told);
  } catch {
    // Storage may be closed to this page; then the key lasts until it is reloaded.
  }
  return key;
}
