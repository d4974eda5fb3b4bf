'use strict';
// A landline server for the tests of Google's Node client.

const {spawn} = require('node:child_process');
const {mkdtempSync, openSync} = require('node:fs');
const {tmpdir} = require('node:os');
const {join} = require('node:path');
const {createInterface} = require('node:readline');
const {once} = require('node:events');
const {randomUUID} = require('node:crypto');
const {PubSub} = require('@google-cloud/pubsub');

const READY = 'landline listening on ';

/** One server process with the embedded broker in a folder of its own. */
class Server {
  constructor(settings = {}) {
    this.settings = settings;
    this.folder = mkdtempSync(join(tmpdir(), 'landline-node-'));
    this.port = '0';
  }

  /** Starts the process, on the port it had before if there was one. */
  async start() {
    const log = openSync(join(this.folder, 'server.log'), 'a');
    this.process = spawn(process.env.LANDLINE_BINARY, [], {
      env: {
        ...process.env,
        CONNECTORS_GCP_BROKER_URL: `embedded:${join(this.folder, 'data')}`,
        CONNECTORS_GCP_PORT: this.port,
        ...this.settings,
      },
      stdio: ['ignore', 'pipe', log],
    });
    this.ended = once(this.process, 'exit');
    const [line] = await once(createInterface(this.process.stdout), 'line');
    if (!line.startsWith(READY)) throw new Error(`no ready line but ${line}`);
    this.port = line.trim().split(':').pop();
    return this;
  }

  /** Ends the process as a crash does. */
  async kill() {
    this.process.kill('SIGKILL');
    await this.ended;
  }

  /** A client in a project of its own. */
  client() {
    process.env.PUBSUB_EMULATOR_HOST = `127.0.0.1:${this.port}`;
    return new PubSub({projectId: `project-${randomUUID().slice(0, 8)}`});
  }
}

/** A topic and a subscription of it. */
async function pair(pubsub, options = {}, subscriberOptions = {}) {
  const [topic] = await pubsub.createTopic('orders');
  await topic.createSubscription('billing', options);
  return [topic, pubsub.subscription('billing', subscriberOptions)];
}

/** Collects messages; `handle` settles each of them. */
class Inbox {
  constructor(subscription, handle = message => message.ack()) {
    this.messages = [];
    this.waiting = [];
    this.errors = [];
    this.subscription = subscription;
    subscription.on('error', error => this.errors.push(error));
    subscription.on('message', message => {
      handle(message);
      this.messages.push(message);
      this.waiting = this.waiting.filter(look => !look());
    });
  }

  /** The next messages, or an error when they don't come in time. */
  take(count, milliseconds = 30_000) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => {
        const got = this.messages.map(m => m.data.toString());
        reject(new Error(`${got.length} of ${count} messages: ${got}; errors: ${this.errors}`));
      }, milliseconds);
      const look = () => {
        if (this.messages.length < count) return false;
        clearTimeout(timer);
        resolve(this.messages.splice(0, count));
        return true;
      };
      if (!look()) this.waiting.push(look);
    });
  }

  close() {
    return this.subscription.close();
  }
}

/** Waits for a condition. */
async function until(condition, what, milliseconds = 60_000) {
  const end = Date.now() + milliseconds;
  while (!condition()) {
    if (Date.now() > end) throw new Error(`not in time: ${what}`);
    await new Promise(resolve => setTimeout(resolve, 10));
  }
}

module.exports = {Server, Inbox, pair, until};
