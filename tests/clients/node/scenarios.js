'use strict';
// The scenarios of ../scenarios.txt with Google's Node client.

const assert = require('node:assert');
const {randomUUID} = require('node:crypto');
const {credentials} = require('@grpc/grpc-js');
const {PubSub, SchemaTypes, Encodings, v1} = require('@google-cloud/pubsub');
const {Inbox, pair, until} = require('./inbox.js');

const SCHEMA = JSON.stringify({type: 'record', name: 'Order', fields: [{name: 'id', type: 'int'}]});
const VIEWER = {role: 'roles/pubsub.viewer', members: ['user:jane@shop.example']};
const SOON = 60_000;
// Longer than three minutes, after which many a proxy forgets a connection that nobody uses.
const IDLE = 190_000;
const KILLS = 3;
// Longest that a publish waits for a server that comes back.
const OUTAGE = 240_000;
// The client's own values, but for the last.
const PATIENT = {
  initialRetryDelayMillis: 100,
  retryDelayMultiplier: 4,
  maxRetryDelayMillis: 60_000,
  initialRpcTimeoutMillis: 60_000,
  rpcTimeoutMultiplier: 1,
  maxRpcTimeoutMillis: 60_000,
  totalTimeoutMillis: OUTAGE,
};
// Messages whose publish is confirmed between two kills.
const BETWEEN_KILLS = 100;
// grpc.default_compression_algorithm
const GZIP = 2;

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

async function get(variable) {
  assert.ok((await fetch(process.env[variable])).ok);
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

  async compressed() {
    const pubsub = connect({'grpc.default_compression_algorithm': GZIP});
    const [topic, subscription] = await pair(pubsub);
    const text = 'x'.repeat(5_000);
    const ids = await publish(topic, Array(20).fill(text));
    const inbox = new Inbox(subscription);
    const received = await inbox.take(20, SOON);
    assert.deepStrictEqual(idsOf(received), ids.sort());
    assert.ok(received.every(message => message.data.toString() === text));
    await inbox.close();
    await pubsub.close();
  },

  async large(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    const data = Buffer.alloc(9_999_000, 'x');
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

  async many_streams(pubsub) {
    const [topic, subscription] = await pair(pubsub, {}, {streamingOptions: {maxStreams: 20}});
    const inbox = new Inbox(subscription);
    const ids = await publish(topic, numbers(1000));
    assert.deepStrictEqual(idsOf(await inbox.take(1000, SOON)), ids.sort());
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

  async update(pubsub) {
    const [topic, subscription] = await pair(pubsub, {labels: {team: 'a'}});
    await subscription.setMetadata({ackDeadlineSeconds: 42, labels: {team: 'b'}});
    const [shown] = await subscription.getMetadata();
    assert.deepStrictEqual([shown.ackDeadlineSeconds, shown.labels, shown.topic], [42, {team: 'b'}, topic.name]);
    await topic.setMetadata({labels: {team: 'c'}});
    assert.deepStrictEqual((await topic.getMetadata())[0].labels, {team: 'c'});
  },

  async iam(pubsub) {
    const [topic] = await pair(pubsub);
    await topic.iam.setPolicy({bindings: [VIEWER]});
    const [policy] = await topic.iam.getPolicy();
    assert.deepStrictEqual(policy.bindings.map(({role, members}) => ({role, members})), [VIEWER]);
    assert.ok(policy.etag.length > 0);
    const wanted = ['pubsub.topics.publish', 'pubsub.topics.get'];
    const [tested] = await topic.iam.testPermissions(wanted);
    assert.deepStrictEqual(tested, Object.fromEntries(wanted.map(name => [name, true])));
  },

  async idle(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    const inbox = new Inbox(subscription);
    await sleep(IDLE);
    const before = Date.now();
    await publish(topic, ['m1']);
    await inbox.take(1, SOON);
    assert.ok(Date.now() - before < 15_000, `it took ${Date.now() - before} ms`);
    assert.deepStrictEqual(inbox.errors, []);
    await inbox.close();
  },

  /** The server closes each stream after about 3 s. */
  async reconnect(pubsub) {
    const [topic, subscription] = await pair(pubsub);
    const inbox = new Inbox(subscription);
    const ids = [];
    for (let n = 0; n < 24; n++) {
      ids.push(...(await publish(topic, [String(n)])));
      await sleep(500);
    }
    assert.deepStrictEqual(idsOf(await inbox.take(24, SOON)), ids.sort());
    assert.deepStrictEqual(inbox.errors, []);
    await inbox.close();
  },

  /** Publishes, receives and acks while servers are killed, and notes every ack that was confirmed. */
  async kill(pubsub) {
    const [topic, subscription] = await pair(pubsub, {enableExactlyOnceDelivery: true});
    topic.setPublishOptions({gaxOpts: {retry: {backoffSettings: PATIENT}}});
    const confirmed = new Set();
    const received = new Set();
    const acked = new Set();
    const returned = new Set();
    const inbox = new Inbox(subscription, message => {
      received.add(message.id);
      if (acked.has(message.id)) returned.add(message.id);
      message.ackWithResponse().then(() => acked.add(message.id), () => {});
    });
    let stop = false;
    // The client repeats what fails meanwhile.
    const keepPublishing = async () => {
      while (!stop) confirmed.add((await publish(topic, ['x']))[0]);
    };
    const publishers = Array.from({length: 4}, keepPublishing);
    const more = () => {
      const wanted = confirmed.size + BETWEEN_KILLS;
      return Promise.race([until(() => confirmed.size >= wanted, 'confirmed publishes', OUTAGE), ...publishers]);
    };
    for (let kill = 0; kill < KILLS; kill++) {
      await more();
      await get('LANDLINE_DISTURB');
    }
    await more();
    stop = true;
    await Promise.all(publishers);
    // Not all acks are confirmed: the answer to one that was carried out may be lost with its server.
    await until(() => [...confirmed].every(id => received.has(id)), 'the messages that are missing', OUTAGE);
    assert.strictEqual(returned.size, 0, `${returned.size} messages came after their confirmed ack`);
    assert.deepStrictEqual(inbox.errors, []);
    await inbox.close();
  },

  async key() {
    const address = process.env.LANDLINE_ADDRESS;
    // Without `emulatorMode` the client takes any address but Google's for an emulator's.
    const of = name =>
      connect({keyFilename: `${process.env.LANDLINE_KEYS}/${name}.json`, apiEndpoint: address, emulatorMode: false, projectId: 'shop'});
    const admin = of('admin');
    const [topic, subscription] = await pair(admin);
    const inbox = new Inbox(subscription);
    await publish(topic, ['hello']);
    assert.strictEqual((await inbox.take(1, SOON))[0].data.toString(), 'hello');
    await inbox.close();
    const reader = of('reader');
    assert.ok((await reader.topic('orders').exists())[0]);
    await assert.rejects(publish(reader.topic('orders'), ['no']), {code: 7, message: /pubsub\.topics\.publish/});
    const [servicePath, port] = address.split(':');
    const nobody = new v1.PublisherClient({servicePath, port: Number(port), sslCreds: credentials.createSsl()});
    await assert.rejects(nobody.getTopic({topic: topic.name}), {code: 16});
    await get('LANDLINE_DELETE_KEY');
    const end = Date.now() + SOON;
    while (await topic.exists().catch(error => (assert.strictEqual(error.code, 16), false))) {
      assert.ok(Date.now() < end, 'the deleted key goes on working');
      await sleep(20);
    }
    await Promise.all([admin.close(), reader.close(), nobody.close()]);
  },
};

/** A client, by default in a project of its own. */
function connect(options = {}) {
  return new PubSub({projectId: `project-${randomUUID().slice(0, 8)}`, ...options});
}

async function main() {
  for (const name of process.argv.slice(2)) {
    const scenario = SCENARIOS[name];
    if (!scenario) {
      console.log('absent', name);
      continue;
    }
    const pubsub = connect();
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
