'use strict';
// The scenarios of ../scenarios.txt with Google's Node client.

const assert = require('node:assert');
const {randomUUID} = require('node:crypto');
const {PubSub, SchemaTypes, Encodings} = require('@google-cloud/pubsub');
const {Inbox, pair} = require('./server.js');

const SCHEMA = JSON.stringify({type: 'record', name: 'Order', fields: [{name: 'id', type: 'int'}]});
const SOON = 60_000;

const sleep = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));
const numbers = (count, prefix = '') => Array.from({length: count}, (_, n) => `${prefix}${n}`);
const idsOf = messages => messages.map(m => m.id).sort();
const publish = (topic, texts, attributes = {}) =>
  Promise.all(texts.map(text => topic.publishMessage({data: Buffer.from(text), attributes})));

/** Receives messages whose acks the server must confirm. */
async function confirmed(subscription, count) {
  const results = [];
  const inbox = new Inbox(subscription, message => results.push(message.ackWithResponse()));
  const received = await inbox.take(count, SOON);
  assert.deepStrictEqual(new Set(await Promise.all(results)), new Set(['SUCCESS']));
  await inbox.close();
  return idsOf(received);
}

async function rewound(pubsub, back) {
  const [topic, subscription] = await pair(pubsub, {retainAckedMessages: true});
  const [snapshot] = await subscription.createSnapshot('before');
  const ids = await publish(topic, numbers(3));
  const inbox = new Inbox(subscription);
  await inbox.take(3, SOON);
  await back(subscription, snapshot);
  assert.deepStrictEqual(idsOf(await inbox.take(3, SOON)), ids.sort());
  await inbox.close();
}

const anHourAgo = () => new Date(Date.now() - 3_600_000);

const SCENARIOS = {
  async batch(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    const ids = await publish(topic, numbers(1000));
    const inbox = new Inbox(subscription);
    assert.deepStrictEqual(idsOf(await inbox.take(1000, SOON)), ids.sort());
    await inbox.close();
  },

  async ordered(pubsub) {
    const [, subscription] = await pair(pubsub, {enableMessageOrdering: true});
    const topic = pubsub.topic('orders', {messageOrdering: true});
    const inbox = new Inbox(subscription);
    for (let n = 0; n < 50; n++) {
      for (const orderingKey of 'abc') topic.publishMessage({data: Buffer.from(String(n)), orderingKey});
    }
    const got = {a: [], b: [], c: []};
    for (const message of await inbox.take(150, SOON)) got[message.orderingKey].push(String(message.data));
    assert.deepStrictEqual(got, {a: numbers(50), b: numbers(50), c: numbers(50)});
    await inbox.close();
  },

  async large(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    const data = Buffer.alloc(9_000_000, 'x');
    await topic.publishMessage({data});
    const inbox = new Inbox(subscription);
    const [message] = await inbox.take(1, SOON);
    assert.ok(data.equals(message.data));
    await inbox.close();
  },

  async flow_control(pubsub) {
    const [topic, subscription] = await pair(pubsub, {}, {flowControl: {maxMessages: 10}});
    const ids = await publish(topic, numbers(200));
    let now = 0;
    let most = 0;
    const inbox = new Inbox(subscription, message => {
      most = Math.max(most, ++now);
      setTimeout(() => {
        now--;
        message.ack();
      }, 2);
    });
    assert.deepStrictEqual(idsOf(await inbox.take(200, SOON)), ids.sort());
    assert.ok(most <= 10, `${most} were under way`);
    await inbox.close();
  },

  async nack(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    const [sent] = await publish(topic, ['m1']);
    let seen = 0;
    const inbox = new Inbox(subscription, message => (seen++ === 0 ? message.nack() : message.ack()));
    assert.deepStrictEqual(idsOf(await inbox.take(2, SOON)), [sent, sent]);
    await inbox.close();
  },

  async extend(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    await publish(topic, ['m1']);
    const inbox = new Inbox(subscription, () => {});
    const [message] = await inbox.take(1, SOON);
    await sleep(14_000);
    message.ack();
    await sleep(1_000);
    assert.strictEqual(inbox.messages.length, 0, 'the message came again meanwhile');
    await inbox.close();
  },

  async exactly_once(pubsub) {
    const [topic, subscription] = await pair(pubsub, {enableExactlyOnceDelivery: true});
    const ids = await publish(topic, numbers(50));
    assert.deepStrictEqual(await confirmed(subscription, 50), ids.sort());
  },

  async lost_lease(pubsub) {
    const [topic, subscription] = await pair(pubsub, {enableExactlyOnceDelivery: true, retainAckedMessages: true});
    const ids = await publish(topic, ['m1', 'm2']);
    const inbox = new Inbox(subscription, () => {});
    const [first, second] = await inbox.take(2, SOON);
    await first.ackWithResponse();
    // A seek ends every lease behind the client's back.
    await subscription.seek(anHourAgo());
    await assert.rejects(second.ackWithResponse(), {errorCode: 'INVALID'});
    const again = await inbox.take(2, SOON);
    for (const message of again) assert.strictEqual(await message.ackWithResponse(), 'SUCCESS');
    assert.deepStrictEqual(idsOf(again), ids.sort());
    await inbox.close();
  },

  async dead_letter(pubsub) {
    const [dead] = await pubsub.createTopic('dead');
    await dead.createSubscription('graveyard');
    const deadLetterPolicy = {deadLetterTopic: dead.name, maxDeliveryAttempts: 5};
    const [topic, subscription] = await pair(pubsub, {deadLetterPolicy});
    await publish(topic, ['m1']);
    const inbox = new Inbox(subscription, message => message.nack());
    assert.deepStrictEqual((await inbox.take(5, SOON)).map(m => m.deliveryAttempt), [1, 2, 3, 4, 5]);
    const graveyard = new Inbox(pubsub.subscription('graveyard'));
    const [buried] = await graveyard.take(1, SOON);
    assert.strictEqual(buried.attributes.CloudPubSubDeadLetterSourceDeliveryCount, '5');
    await inbox.close();
    await graveyard.close();
  },

  async filter(pubsub) {
    const [topic, subscription] = await pair(pubsub, {filter: 'attributes.color = "red"'});
    const [red] = await Promise.all(['red', 'blue'].map(color => publish(topic, numbers(10), {color})));
    const inbox = new Inbox(subscription);
    assert.deepStrictEqual(idsOf(await inbox.take(10, SOON)), red.sort());
    await inbox.close();
  },

  seek: pubsub => rewound(pubsub, subscription => subscription.seek(anHourAgo())),

  snapshot: pubsub => rewound(pubsub, (_, snapshot) => snapshot.seek()),

  async detach(pubsub) {
    const [, subscription] = await pair(pubsub);
    await pubsub.detachSubscription('billing');
    assert.ok(await subscription.detached());
    const failed = new Promise(resolve => subscription.once('error', resolve));
    subscription.on('message', () => {});
    assert.strictEqual((await failed).code, 9, 'FAILED_PRECONDITION');
    await subscription.close();
  },

  async schema(pubsub) {
    const made = await pubsub.createSchema('order', SchemaTypes.Avro, SCHEMA);
    const schemaSettings = {schema: await made.getName(), encoding: Encodings.Json};
    const [topic] = await pubsub.createTopic({name: 'orders', schemaSettings});
    await publish(topic, ['{"id": 1}']);
    await assert.rejects(publish(topic, ['{"id": "one"}']), {code: 3});
  },

  async restart(pubsub) {
    const [topic] = await pair(pubsub, {enableExactlyOnceDelivery: true});
    const before = await publish(topic, numbers(50, 'before-'));
    assert.deepStrictEqual(await confirmed(pubsub.subscription('billing'), 50), before.sort());
    const kept = await publish(topic, numbers(50, 'kept-'));
    assert.ok((await fetch(process.env.LANDLINE_RESTART)).ok);
    const after = await publish(topic, numbers(50, 'after-'));
    assert.deepStrictEqual(await confirmed(pubsub.subscription('billing'), 100), [...kept, ...after].sort());
  },
};

async function main() {
  for (const name of process.argv.slice(2)) {
    const scenario = SCENARIOS[name];
    if (!scenario) {
      console.log('absent', name);
      continue;
    }
    const pubsub = new PubSub({projectId: `project-${randomUUID().slice(0, 8)}`});
    try {
      await scenario(pubsub);
      console.log('ok', name);
    } catch (error) {
      console.log('failed', name, String(error).replaceAll('\n', ' '));
    }
    await pubsub.close();
  }
}

main().then(() => process.exit(0));
