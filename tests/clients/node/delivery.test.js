'use strict';
// Publishing, streaming pull and settling through the high-level client.

const assert = require('node:assert');
const {after, before, test} = require('node:test');
const {Server, Inbox, pair} = require('./server.js');

let server;
before(async () => {
  server = await new Server().start();
});
after(() => server.kill());

const texts = messages => messages.map(m => m.data.toString());

test('flow control lets every message through', async () => {
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub, {}, {flowControl: {maxMessages: 10}});
  let outstanding = 0;
  let most = 0;
  const inbox = new Inbox(subscription, message => {
    most = Math.max(most, ++outstanding);
    setTimeout(() => {
      outstanding--;
      message.ack();
    }, 1);
  });
  const data = Array.from({length: 500}, (_, n) => Buffer.from(String(n)));
  const ids = await Promise.all(data.map(d => topic.publishMessage({data: d, attributes: {origin: 'test'}})));
  const received = await inbox.take(500);
  assert.deepStrictEqual(new Set(received.map(m => m.id)), new Set(ids));
  assert.ok(most <= 10, `${most} outstanding`);
  assert.deepStrictEqual(received[0].attributes, {origin: 'test'});
  await inbox.close();
  await pubsub.close();
});

test('a nacked message comes again', async () => {
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub);
  let seen = 0;
  const inbox = new Inbox(subscription, message => (seen++ === 0 ? message.nack() : message.ack()));
  await topic.publishMessage({data: Buffer.from('m1')});
  const [first, second] = await inbox.take(2);
  assert.strictEqual(first.id, second.id);
  assert.notStrictEqual(first.ackId, second.ackId);
  await inbox.close();
  await pubsub.close();
});

test('ordered messages arrive in order', async () => {
  const pubsub = server.client();
  await pubsub.createTopic('orders');
  const topic = pubsub.topic('orders', {messageOrdering: true});
  await topic.createSubscription('billing', {enableMessageOrdering: true});
  const inbox = new Inbox(pubsub.subscription('billing'));
  for (let n = 0; n < 50; n++) {
    for (const orderingKey of ['a', 'b', 'c']) {
      topic.publishMessage({data: Buffer.from(String(n)), orderingKey});
    }
  }
  const got = {a: [], b: [], c: []};
  for (const message of await inbox.take(150)) got[message.orderingKey].push(Number(message.data));
  const expected = Array.from({length: 50}, (_, n) => n);
  assert.deepStrictEqual(got, {a: expected, b: expected, c: expected});
  await inbox.close();
  await pubsub.close();
});

test('exactly-once acks are confirmed', async () => {
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub, {enableExactlyOnceDelivery: true});
  const results = [];
  const inbox = new Inbox(subscription, message => results.push(message.ackWithResponse()));
  const data = Array.from({length: 100}, (_, n) => Buffer.from(String(n)));
  const ids = await Promise.all(data.map(d => topic.publishMessage({data: d})));
  const received = await inbox.take(100);
  assert.deepStrictEqual(received.map(m => m.id).sort(), ids.sort());
  assert.deepStrictEqual(new Set(await Promise.all(results)), new Set(['SUCCESS']));
  await inbox.close();
  await pubsub.close();
});

test('an exactly-once ack of a lost lease fails alone', async () => {
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub, {enableExactlyOnceDelivery: true});
  const inbox = new Inbox(subscription, () => {});
  await Promise.all(['lost', 'kept'].map(text => topic.publishMessage({data: Buffer.from(text)})));
  const messages = await inbox.take(2);
  const lost = messages.find(m => m.data.toString() === 'lost');
  const kept = messages.find(m => m.data.toString() === 'kept');
  // Behind the client's back the lease goes away.
  const {v1} = require('@google-cloud/pubsub');
  const {credentials} = require('@grpc/grpc-js');
  const raw = new v1.SubscriberClient({
    servicePath: '127.0.0.1',
    port: Number(server.port),
    sslCreds: credentials.createInsecure(),
    projectId: pubsub.projectId,
  });
  await raw.modifyAckDeadline({subscription: subscription.name, ackIds: [lost.ackId], ackDeadlineSeconds: 0});
  const [again] = await inbox.take(1);
  const settled = await Promise.allSettled([lost.ackWithResponse(), kept.ackWithResponse(), again.ackWithResponse()]);
  assert.strictEqual(settled[0].status, 'rejected');
  assert.strictEqual(settled[0].reason.errorCode, 'INVALID');
  assert.deepStrictEqual(settled.slice(1).map(s => s.value), ['SUCCESS', 'SUCCESS']);
  await inbox.close();
  await raw.close();
  await pubsub.close();
});

test('delivery attempts and dead letters', async () => {
  const pubsub = server.client();
  const [dead] = await pubsub.createTopic('dead');
  await dead.createSubscription('graveyard');
  const policy = {deadLetterTopic: dead.name, maxDeliveryAttempts: 5};
  const [topic, subscription] = await pair(pubsub, {deadLetterPolicy: policy});
  const inbox = new Inbox(subscription, message => message.nack());
  await topic.publishMessage({data: Buffer.from('m1')});
  assert.deepStrictEqual((await inbox.take(5)).map(m => m.deliveryAttempt), [1, 2, 3, 4, 5]);
  const graveyard = new Inbox(pubsub.subscription('graveyard'));
  const [buried] = await graveyard.take(1);
  assert.strictEqual(buried.data.toString(), 'm1');
  assert.strictEqual(buried.attributes.CloudPubSubDeadLetterSourceDeliveryCount, '5');
  await inbox.close();
  await graveyard.close();
  await pubsub.close();
});

test('large messages travel both ways', async () => {
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub);
  const inbox = new Inbox(subscription);
  await topic.publishMessage({data: Buffer.alloc(9_900_000, 'x')});
  const [message] = await inbox.take(1);
  assert.strictEqual(message.data.length, 9_900_000);
  await inbox.close();
  await pubsub.close();
});

test('an idle stream stays open', async () => {
  // The client pings every 30 s and drops a stream that does not answer within 15 s.
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub);
  const inbox = new Inbox(subscription);
  await new Promise(resolve => setTimeout(resolve, 50_000));
  assert.deepStrictEqual(inbox.errors, []);
  const since = Date.now();
  await topic.publishMessage({data: Buffer.from('m1')});
  await inbox.take(1);
  assert.ok(Date.now() - since < 3000, `${Date.now() - since} ms`);
  await inbox.close();
  await pubsub.close();
});

test('administration', async () => {
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub, {ackDeadlineSeconds: 20});
  const [metadata] = await subscription.getMetadata();
  assert.strictEqual(metadata.ackDeadlineSeconds, 20);
  assert.strictEqual(metadata.topic, topic.name);
  await subscription.setMetadata({ackDeadlineSeconds: 30});
  assert.strictEqual((await subscription.getMetadata())[0].ackDeadlineSeconds, 30);
  const [snapshot] = await subscription.createSnapshot('before');
  const inbox = new Inbox(subscription);
  await topic.publishMessage({data: Buffer.from('m1')});
  await inbox.take(1);
  await new Promise(resolve => setTimeout(resolve, 500));
  await snapshot.seek();
  assert.deepStrictEqual(texts(await inbox.take(1)), ['m1']);
  await inbox.close();
  assert.deepStrictEqual((await pubsub.getTopics())[0].map(t => t.name), [topic.name]);
  assert.deepStrictEqual((await topic.getSubscriptions())[0].map(s => s.name), [subscription.name]);
  await snapshot.delete();
  await subscription.delete();
  await topic.delete();
  assert.deepStrictEqual(await topic.exists(), [false]);
  await pubsub.close();
});
