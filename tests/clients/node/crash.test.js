'use strict';
// The server is killed in the middle of everything; the client goes on by itself.

const assert = require('node:assert');
const {test} = require('node:test');
const {Server, Inbox, pair, until} = require('./server.js');

test('nothing is lost when the server is killed', async () => {
  const server = await new Server().start();
  const pubsub = server.client();
  const [topic, subscription] = await pair(pubsub, {enableExactlyOnceDelivery: true});
  const confirmed = new Set();
  const acked = new Set();
  const again = [];
  const inbox = new Inbox(subscription, message => {
    if (acked.has(message.id)) again.push(message.id);
    message.ackWithResponse().then(() => acked.add(message.id), () => {});
  });
  let stop = false;
  const publish = async () => {
    for (let n = 0; !stop; n++) confirmed.add(await topic.publishMessage({data: Buffer.from(String(n))}));
  };
  const publishers = [publish(), publish(), publish(), publish()];
  for (let round = 0; round < 3; round++) {
    const goal = confirmed.size + 200;
    await until(() => confirmed.size >= goal, 'publishing before the kill');
    await server.kill();
    await server.start();
  }
  const goal = confirmed.size + 200;
  await until(() => confirmed.size >= goal, 'publishing after the last kill');
  stop = true;
  await Promise.all(publishers);
  const missing = () => [...confirmed].filter(id => !acked.has(id));
  await until(() => missing().length === 0, 'every confirmed message acked').catch(error => {
    throw new Error(`${error.message}: ${missing().length} missing`);
  });
  assert.deepStrictEqual(again, [], 'messages that came after their confirmed ack');
  await inbox.close();
  await pubsub.close();
  await server.kill();
});
