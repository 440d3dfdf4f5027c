'use strict';
// Reseeds this process's random generators when its microVM is restored from a snapshot.
//
// Every VM of a template continues from the same memory. The agent (PID 1) knows of each Node process and each of its
// worker threads by a connection to its socket and sends, after a restore and before the first request,
//
//   reseed <generation> <64 bytes in hex>\n        answered by        ok <generation>\n
//
// Math.random: V8's generator cannot be reseeded, so it is replaced from the start by xoshiro128**, of the same range
// and 53 bits.
//
// crypto: nor can OpenSSL's generator inside Node be reseeded from JavaScript. So after a reseed the functions that hand
// out its bytes take the kernel's instead, which was reseeded first. What OpenSSL draws for itself is out of reach here:
// the keys and nonces of TLS connections and of crypto's generateKey*, and webcrypto's keys. A program that needs those
// should make its first ones after the restore, in a process of its own, or wait for OpenSSL's own reseed.

const fs = require('node:fs');
const net = require('node:net');
const crypto = require('node:crypto');
const { isMainThread } = require('node:worker_threads');
const { syncBuiltinESMExports } = require('node:module');

const SOCKET = process.env.STASIS_HOOK_SOCKET || '/run/stasis/hooks.sock'; // the variable is for tests

const urandom = fs.existsSync(SOCKET) ? fs.openSync('/dev/urandom', 'r') : -1;

function fromKernel(view) {
  for (let at = 0; at < view.length; ) at += fs.readSync(urandom, view, at, view.length - at, null);
  return view;
}

// --- Math.random -----------------------------------------------------------------------------------------------------

let s0, s1, s2, s3;

function seedMath(seed) {
  s0 = seed.readInt32LE(0);
  s1 = seed.readInt32LE(4);
  s2 = seed.readInt32LE(8);
  s3 = seed.readInt32LE(12) | 1; // all zero is the one state it never leaves
}

function next() {
  const product = Math.imul(s1, 5);
  const result = Math.imul((product << 7) | (product >>> 25), 9);
  const t = s1 << 9;
  s2 ^= s0;
  s3 ^= s1;
  s1 ^= s2;
  s0 ^= s3;
  s2 ^= t;
  s3 = (s3 << 11) | (s3 >>> 21);
  return result;
}

function random() {
  return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
}

// --- crypto ----------------------------------------------------------------------------------------------------------

// A worker that starts after a restore shares a generator that is older than the restore.
let restored = !isMainThread;

// Until a restore, the original. After it `ours`, which calls the original too: that checks the arguments.
function replaced(owner, name, ours) {
  const plain = owner[name];
  if (typeof plain !== 'function') return;
  const wrapper = function (...args) {
    return restored ? ours.call(this, plain, args) : Reflect.apply(plain, this, args);
  };
  Object.defineProperty(wrapper, 'name', { value: name });
  Object.defineProperty(wrapper, 'length', { value: plain.length });
  const { enumerable } = Object.getOwnPropertyDescriptor(owner, name);
  Object.defineProperty(owner, name, { value: wrapper, enumerable, writable: true, configurable: true });
}

// As `replaced`, for functions whose last argument may be a callback, to be called in a later turn.
function replacedAsync(owner, name, ours) {
  replaced(owner, name, (plain, args) => {
    const callback = typeof args.at(-1) === 'function' ? args.pop() : null;
    const result = ours(plain, args);
    if (!callback) return result;
    setImmediate(callback, null, result);
  });
}

function bytesOf(view) {
  return ArrayBuffer.isView(view)
    ? new Uint8Array(view.buffer, view.byteOffset, view.byteLength)
    : new Uint8Array(view);
}

// A version 4 UUID of the kernel's bytes.
function uuid() {
  const bytes = fromKernel(Buffer.alloc(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = bytes.toString('hex');
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20)}`;
}

// Uniform in [min, max): of 48 bits, those that would favour small results are drawn again.
function integer(min, max) {
  const range = max - min;
  const limit = 2 ** 48 - (2 ** 48 % range);
  for (;;) {
    const drawn = fromKernel(Buffer.alloc(6)).readUIntLE(0, 6);
    if (drawn < limit) return min + (drawn % range);
  }
}

function replaceCrypto() {
  const { randomFillSync } = crypto;
  for (const name of ['randomBytes', 'pseudoRandomBytes', 'rng', 'prng']) {
    replacedAsync(crypto, name, (plain, args) => fromKernel(plain(...args)));
  }
  const fill = (_, [target, offset = 0, size]) => {
    randomFillSync(target, offset, size);
    const unit = target.BYTES_PER_ELEMENT ?? 1;
    fromKernel(bytesOf(target).subarray(offset * unit, size === undefined ? undefined : (offset + size) * unit));
    return target;
  };
  replaced(crypto, 'randomFillSync', fill);
  replacedAsync(crypto, 'randomFill', fill);
  replacedAsync(crypto, 'randomInt', (plain, args) => {
    plain(...args);
    return args.length > 1 ? integer(args[0], args[1]) : integer(0, args[0]);
  });
  const uuidOf = function (plain, args) {
    Reflect.apply(plain, this, args);
    return uuid();
  };
  replaced(crypto, 'randomUUID', uuidOf);
  // This prototype serves crypto.webcrypto, crypto.getRandomValues and, where there is one, globalThis.crypto.
  const web = Object.getPrototypeOf(crypto.webcrypto);
  replaced(web, 'randomUUID', uuidOf);
  replaced(web, 'getRandomValues', function (plain, args) {
    Reflect.apply(plain, this, args);
    fromKernel(bytesOf(args[0]));
    return args[0];
  });
  syncBuiltinESMExports();
}

// --- the agent -------------------------------------------------------------------------------------------------------

function register() {
  // The connection is made before the first seed is drawn: a snapshot between the two then finds it.
  const connection = net.connect(SOCKET);
  connection.unref();
  connection.on('error', () => {}); // no agent any more: nothing to repair
  connection.write(`node ${process.pid}\n`);
  let heard = '';
  connection.setEncoding('latin1');
  connection.on('data', (text) => {
    heard += text;
    for (let end; (end = heard.indexOf('\n')) >= 0; heard = heard.slice(end + 1)) {
      const [word, generation, seed] = heard.slice(0, end).split(' ');
      if (word !== 'reseed') continue;
      seedMath(Buffer.from(seed, 'hex'));
      restored = true;
      connection.write(`ok ${generation}\n`);
    }
  });
}

if (urandom >= 0) {
  register();
  seedMath(fromKernel(Buffer.alloc(16)));
  Math.random = random;
  replaceCrypto();
}
