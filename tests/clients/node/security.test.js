'use strict';
// Google's client with a key that the server issued, over TLS, where authentication is enforced.

const assert = require('node:assert');
const {execFileSync} = require('node:child_process');
const {mkdtempSync} = require('node:fs');
const {tmpdir} = require('node:os');
const {join} = require('node:path');
const {after, before, test} = require('node:test');

// gRPC reads its roots when it is loaded, so the certificate comes first. It is for localhost and vouches for itself.
const folder = mkdtempSync(join(tmpdir(), 'landline-node-tls-'));
const [certificate, certificateKey] = [join(folder, 'server.crt'), join(folder, 'server.key')];
const curve = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes'];
const named = ['-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost'];
const files = ['-keyout', certificateKey, '-out', certificate];
execFileSync('openssl', ['req', '-x509', ...curve, ...named, ...files, '-days', '2'], {stdio: 'ignore'});
process.env.GRPC_DEFAULT_SSL_ROOTS_FILE_PATH = certificate;
delete process.env.PUBSUB_EMULATOR_HOST;
const {PubSub} = require('@google-cloud/pubsub');
const {Server, Inbox, pair} = require('./server.js');

const server = new Server({
  CONNECTORS_GCP_TLS_CERT_FILE: certificate,
  CONNECTORS_GCP_TLS_KEY_FILE: certificateKey,
  CONNECTORS_GCP_AUTH: 'enforce',
  CONNECTORS_GCP_AUTH_ADMINS: 'serviceAccount:admin@shop.example',
  CONNECTORS_GCP_AUTH_KEYS_FILE: join(folder, 'keys.json'),
});

/** The file of a new key. */
function createKey(name) {
  const out = join(folder, `${name}.json`);
  const env = {...process.env, ...server.settings};
  execFileSync(process.env.LANDLINE_BINARY, ['keys', 'create', '--out', out, '--email', `${name}@shop.example`], {env});
  return out;
}

/** A client with a key. Without `emulatorMode` it takes any address but Google's for an emulator's. */
function client(keyFilename) {
  return new PubSub({projectId: 'shop', keyFilename, apiEndpoint: `localhost:${server.port}`, emulatorMode: false});
}

let keys;
before(async () => {
  keys = {admin: createKey('admin'), nobody: createKey('nobody')};
  await server.start();
});
after(() => server.kill());

test('a key file is all that the client needs', async () => {
  const pubsub = client(keys.admin);
  const [topic, subscription] = await pair(pubsub);
  const inbox = new Inbox(subscription);
  await topic.publishMessage({data: Buffer.from('hello')});
  assert.strictEqual((await inbox.take(1))[0].data.toString(), 'hello');
  await inbox.close();
  await pubsub.close();

  const nobody = client(keys.nobody);
  const refused = {code: 7, message: /pubsub\.topics\.publish/};
  await assert.rejects(nobody.topic('orders').publishMessage({data: Buffer.from('no')}), refused);
  await nobody.close();
});
