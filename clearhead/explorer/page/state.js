/** The state of a view lives in the address, so that a view is shared by sharing the address. */

/** What the browser's Back button undoes. */
const STEPS = ['panel', 'model', 'site', 'head'];

/** @returns {State} */
export function makeState() {
  const start = window.CLEARHEAD_START?.state ?? {};
  /** @type {Map<string, string>} */
  const values = new Map();
  /** @type {Set<{keys: string[], hear: () => void, node?: Node}>} */
  const hearers = new Set();
  let timer = 0;
  readFragment();
  window.addEventListener('hashchange', () => {
    const before = new Map(values);
    readFragment();
    tell([...values.keys(), ...before.keys()].filter((key) => values.get(key) !== before.get(key)));
  });

  function readFragment() {
    const told = new URLSearchParams(location.hash.slice(1));
    told.delete('key');
    values.clear();
    for (const [key, value] of told.size ? told : Object.entries(start)) values.set(key, value);
  }
  const fragment = (of = values) => '#' + new URLSearchParams([...of].sort(([a], [b]) => (a < b ? -1 : 1)));
  /** @param {'replaceState' | 'pushState'} how */
  function put(how, address = '') {
    clearTimeout(timer);
    try {
      if (location.hash !== address) history[how](null, '', address);
    } catch {
      // A notebook's frame has no address of its own; its view simply is not shared.
    }
  }
  const flush = () => put('replaceState', fragment());
  /** @param {string[]} keys */
  function tell(keys) {
    for (const hearer of [...hearers]) {
      if (hearer.node?.isConnected === false) hearers.delete(hearer);
      else if (hearer.keys.some((key) => keys.includes(key))) hearer.hear();
    }
  }
  return {
    get: (key, otherwise = '') => values.get(key) ?? otherwise,
    number(key, otherwise) {
      const value = values.get(key);
      return value && Number.isFinite(Number(value)) ? Number(value) : otherwise;
    },
    set(news) {
      const before = new Map(values);
      for (const [key, value] of Object.entries(news)) {
        if (value === null) values.delete(key);
        else values.set(key, String(value));
      }
      const changed = Object.keys(news).filter((key) => values.get(key) !== before.get(key));
      if (!changed.length) return;
      if (STEPS.some((key) => changed.includes(key))) {
        put('replaceState', fragment(before));
        put('pushState', fragment());
      } else {
        // Browsers refuse more than some 200 changes of the address in half a minute, and a slider makes more.
        clearTimeout(timer);
        timer = window.setTimeout(flush, 200);
      }
      tell(changed);
    },
    flush,
    all: () => Object.fromEntries(values),
    subscribe: (keys, hear, node) => void hearers.add({keys, hear, node}),
  };
}

/** What stands before the number of a change that has one. @type {{[how: string]: string}} */
const LETTERS = {scale: 'x', steer: 's'};
/** Changes as text: `blocks.3.attention:2:zero,blocks.4.feedforward:*:x0.5,blocks.4.residual:*:s2,...`
 * @param {Change[]} changes */
export const writeChanges = (changes) => changes.map(({site, head, how, by}) => `${site}:${head ?? '*'}:${LETTERS[how] ? LETTERS[how] + by : how}`).join(',');

/** @returns {Change[]} */
export function readChanges(text = '') {
  return text.split(',').map((part) => part.split(':')).filter((parts) => parts.length === 3 && /^(zero|mean|patch|[xs]-?[\d.]+)$/.test(parts[2]))
    .map(([site, part, how]) => {
      const head = part === '*' ? null : Number(part);
      const measured = /** @type {Change['how'] | undefined} */ (Object.keys(LETTERS).find((name) => LETTERS[name] === how[0]));
      return measured ? {site, head, how: measured, by: Number(how.slice(1))} : {site, head, how: /** @type {Change['how']} */ (how)};
    });
}
