/** The tokenizer: a tokenizer.json's steps, of the kinds that clearhead/explorer/live_tokenizer.py lets through. */

/** GPT-2's visible character for each byte. */
const LETTERS = (() => {
  const printable = (/** @type {number} */ byte) => (byte > 32 && byte < 127) || (byte > 160 && byte < 173) || byte > 173;
  let hidden = 256;
  return Array.from({length: 256}, (_, byte) => String.fromCharCode(printable(byte) ? byte : hidden++));
})();
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));
const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+/gu;

/** Matches of a pattern, and what lies between them. */
function isolate(text = '', pattern = WORDS) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    if (!found[0]) continue;
    parts.push(text.slice(at, found.index), found[0]);
    at = found.index + found[0].length;
  }
  return [...parts, text.slice(at)].filter(Boolean);
}

/** @type {{[type: string]: (text: string, step: any) => string}} */
const NORMAL = {
  Prepend: (text, {prepend}) => (text ? prepend + text : text),
  Replace: (text, {from, to}) => text.replaceAll(from, to),
  // Letter by letter: of a whole word, JavaScript makes the last Σ a ς, and Python's tokenizers do not.
  Lowercase: (text) => Array.from(text, (letter) => letter.toLowerCase()).join(''),
  NFC: (text) => text.normalize('NFC'), NFD: (text) => text.normalize('NFD'),
  NFKC: (text) => text.normalize('NFKC'), NFKD: (text) => text.normalize('NFKD'),
};
/** @type {{[type: string]: (text: string, step: any) => string[]}} */
const CUTS = {
  Digits: (text, {each}) => isolate(text, each ? /\p{N}/gu : /\p{N}+/gu),
  Split: (text, {pattern}) => isolate(text, new RegExp(pattern, 'gu')),
  WhitespaceSplit: (text) => text.split(/\p{White_Space}+/u).filter(Boolean),
  ByteLevel: (text, {space, words}) => {
    const whole = space && !text.startsWith(' ') ? ` ${text}` : text;
    return (words ? isolate(whole) : [whole]).map((part) => Array.from(new TextEncoder().encode(part), (byte) => LETTERS[byte]).join(''));
  },
};

/** Byte-pair encoding: the pair that was learnt first is merged first, from the left.
 * @param {Pipeline['model']} model */
function bytePairs({vocab, merges, unk, fuse, bytes, whole}) {
  const wide = 2 ** 21;
  const ranks = new Map(merges.map(([left, right], rank) => [vocab[left] * wide + vocab[right], rank]));
  /** @param {string} word */
  return (word) => {
    if (whole && Object.hasOwn(vocab, word)) return [vocab[word]];
    /** @type {number[]} */
    const ids = [];
    for (const letter of word) {
      const pieces = bytes ? Array.from(new TextEncoder().encode(letter), (byte) => vocab[`<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`]) : [];
      if (Object.hasOwn(vocab, letter)) ids.push(vocab[letter]);
      else if (pieces.length && pieces.every((id) => id !== undefined)) ids.push(...pieces);
      else if (unk !== null && !(fuse && ids.at(-1) === unk)) ids.push(unk);
    }
    const rank = (at = 0) => ranks.get(ids[at] * wide + ids[at + 1]) ?? Infinity;
    // Only the pairs beside a merge are looked up again: a text without blanks is one long word.
    const pairs = ids.map((_, at) => rank(at));
    for (;;) {
      let at = 0;
      for (let i = 1; i < pairs.length; i++) if (pairs[i] < pairs[at]) at = i;
      if (!(pairs[at] < Infinity)) return ids;
      ids.splice(at, 2, vocab[merges[pairs[at]].join('')]);
      pairs.splice(at, 2, rank(at));
      if (at) pairs[at - 1] = rank(at - 1);
    }
  };
}

/** @param {LiveTokenizer} told */
export function makeTokenizer({sides, names, special, roles}) {
  const specials = new Set(special);
  /** @param {Pipeline} pipeline */
  function encoder({added, normal, cuts, model, before, after}) {
    const alone = added.map(([text]) => text).sort((a, b) => b.length - a.length);
    const ids = new Map(added.map(([text, id]) => [text, id]));
    const pattern = alone.length ? new RegExp(alone.map((text) => text.replace(/[\\^$.*+?()[\]{}|/-]/g, '\\$&')).join('|'), 'gu') : null;
    const pieces = model.type === 'BPE' ? bytePairs(model) : (word = '') => [Object.hasOwn(model.vocab, word) ? model.vocab[word] : model.unk];
    return (text = '', around = true) => {
      const found = (pattern ? isolate(text, pattern) : [text].filter(Boolean)).flatMap((part) => {
        const id = ids.get(part);
        if (id !== undefined) return [id];
        const clean = normal.reduce((whole, step) => NORMAL[step.type](whole, step), part);
        return cuts.reduce((parts, step) => parts.flatMap((one) => CUTS[step.type](one, step)), [clean]).flatMap((word) => (word ? pieces(word) : []));
      });
      return around ? [...before, ...found, ...after] : found;
    };
  }
  const source = encoder(sides.source), target = sides.target ? encoder(sides.target) : source;
  const {back, model} = sides.target ?? sides.source;
  const spelled = new Map(Object.entries(model.vocab).map(([token, id]) => [id, token]));
  for (const [text, id] of (sides.target ?? sides.source).added) spelled.set(id, text);
  return {
    ...roles, specials,
    encode: (text = '', around = true, isTarget = false) => (isTarget ? target : source)(text, around),
    name: (id = 0) => names[id] ?? `<${id}>`,
    /** The text of ids, without special tokens; ids that the vocabulary lacks say nothing. @param {number[]} ids */
    decode(ids) {
      let tokens = ids.filter((id) => spelled.has(id) && !specials.has(id)).map((id) => spelled.get(id) ?? '');
      for (const step of back) tokens = BACK[step.type](tokens, step);
      return tokens.join('');
    },
  };
}

/** @param {number[]} bytes */
const utf8 = (bytes, fatal = false) => new TextDecoder('utf-8', {ignoreBOM: true, fatal}).decode(new Uint8Array(bytes));

/** @type {{[type: string]: (tokens: string[], step: any) => string[]}} */
const BACK = {
  ByteLevel: (tokens) => [utf8(tokens.flatMap((token) => {
    const bytes = Array.from(token, (letter) => BYTES.get(letter));
    return bytes.every((byte) => byte !== undefined) ? /** @type {number[]} */ (bytes) : [...new TextEncoder().encode(token)];
  }))],
  Replace: (tokens, {from, to}) => tokens.map((token) => token.replaceAll(from, to)),
  Fuse: (tokens) => [tokens.join('')],
  Space: (tokens) => [tokens.join(' ')],
  Strip: (tokens, {content, start, stop}) => tokens.map((token) => {
    let [from, to] = [0, token.length];
    while (from < Math.min(start, token.length) && token[from] === content) from++;
    while (token.length - to < stop && to > from && token[to - 1] === content) to--;
    return token.slice(from, to);
  }),
  /** Runs of byte pieces are one text; bytes that are none become a replacement character each. */
  ByteFallback(tokens) {
    /** @type {string[]} */
    const out = [];
    /** @type {number[]} */
    let run = [];
    const close = () => {
      try {
        if (run.length) out.push(utf8(run, true));
      } catch {
        out.push(...run.map(() => '\ufffd'));
      }
      run = [];
    };
    for (const token of tokens) {
      const byte = /^<0x([0-9A-F]{2})>$/.exec(token);
      if (byte) run.push(parseInt(byte[1], 16));
      else {
        close();
        out.push(token);
      }
    }
    close();
    return out;
  },
};
