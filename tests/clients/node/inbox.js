'use strict';
// What the scenarios receive with, and wait with.

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

module.exports = {Inbox, pair, until};
