import com.google.api.core.ApiFuture;
import com.google.api.core.ApiFutures;
import com.google.api.gax.batching.FlowControlSettings;
import com.google.api.gax.core.CredentialsProvider;
import com.google.api.gax.core.FixedCredentialsProvider;
import com.google.api.gax.core.NoCredentialsProvider;
import com.google.api.gax.grpc.GrpcTransportChannel;
import com.google.api.gax.rpc.ApiException;
import com.google.api.gax.rpc.FixedTransportChannelProvider;
import com.google.api.gax.rpc.InvalidArgumentException;
import com.google.api.gax.rpc.StatusCode;
import com.google.api.gax.rpc.TransportChannelProvider;
import com.google.auth.oauth2.ServiceAccountCredentials;
import com.google.cloud.pubsub.v1.AckReplyConsumerWithResponse;
import com.google.cloud.pubsub.v1.AckResponse;
import com.google.cloud.pubsub.v1.MessageReceiverWithAckResponse;
import com.google.cloud.pubsub.v1.Publisher;
import com.google.cloud.pubsub.v1.SchemaServiceClient;
import com.google.cloud.pubsub.v1.SchemaServiceSettings;
import com.google.cloud.pubsub.v1.Subscriber;
import com.google.cloud.pubsub.v1.SubscriptionAdminClient;
import com.google.cloud.pubsub.v1.SubscriptionAdminSettings;
import com.google.cloud.pubsub.v1.TopicAdminClient;
import com.google.cloud.pubsub.v1.TopicAdminSettings;
import com.google.iam.v1.Binding;
import com.google.iam.v1.Policy;
import com.google.protobuf.ByteString;
import com.google.protobuf.FieldMask;
import com.google.protobuf.Timestamp;
import com.google.pubsub.v1.CreateSnapshotRequest;
import com.google.pubsub.v1.DeadLetterPolicy;
import com.google.pubsub.v1.DetachSubscriptionRequest;
import com.google.pubsub.v1.Encoding;
import com.google.pubsub.v1.PubsubMessage;
import com.google.pubsub.v1.Schema;
import com.google.pubsub.v1.SchemaSettings;
import com.google.pubsub.v1.SeekRequest;
import com.google.pubsub.v1.Subscription;
import com.google.pubsub.v1.Topic;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.IntStream;

/** The scenarios of ../scenarios.txt with Google's Java client. */
public final class Scenarios implements AutoCloseable {
  private static final int SOON_SECONDS = 60;
  private static final int LARGEST_ANSWER = 20 << 20;
  private static final int STREAMS = 20;
  // Longer than three minutes, after which many a proxy forgets a connection that nobody uses.
  private static final int IDLE_MILLISECONDS = 190_000;
  // Longest wait for a server that comes back, and for a message whose lease went down with it.
  private static final int OUTAGE_SECONDS = 240;
  private static final int KILLS = 3;
  // Messages whose publish is confirmed between two kills.
  private static final int BETWEEN_KILLS = 100;
  private static final String SCHEMA =
      "{\"type\": \"record\", \"name\": \"Order\", \"fields\": [{\"name\": \"id\", \"type\": \"int\"}]}";

  private interface Scenario {
    void run(Scenarios scenarios) throws Exception;
  }

  private static final Map<String, Scenario> ALL = new LinkedHashMap<>();

  static {
    ALL.put("batch", Scenarios::batch);
    ALL.put("ordered", Scenarios::ordered);
    ALL.put("compressed", Scenarios::compressed);
    ALL.put("large", Scenarios::large);
    ALL.put("flow_control", Scenarios::flowControl);
    ALL.put("many_streams", Scenarios::manyStreams);
    ALL.put("nack", Scenarios::nack);
    ALL.put("extend", Scenarios::extend);
    ALL.put("exactly_once", Scenarios::exactlyOnce);
    ALL.put("lost_lease", Scenarios::lostLease);
    ALL.put("dead_letter", Scenarios::deadLetter);
    ALL.put("filter", Scenarios::filter);
    ALL.put("seek", s -> s.rewound(s::seekBack));
    ALL.put("snapshot", s -> s.rewound(s::seekSnapshot));
    ALL.put("detach", Scenarios::detach);
    ALL.put("update", Scenarios::update);
    ALL.put("schema", Scenarios::schema);
    ALL.put("iam", Scenarios::iam);
    ALL.put("idle", Scenarios::idle);
    ALL.put("reconnect", Scenarios::reconnect);
    ALL.put("key", s -> key());
    ALL.put("kill", Scenarios::kill);
  }

  public static void main(String[] names) throws Exception {
    for (String name : names) {
      if (!ALL.containsKey(name)) {
        System.out.println("absent " + name);
        continue;
      }
      try (Scenarios scenarios = name.equals("key") ? null : new Scenarios(plain())) {
        ALL.get(name).run(scenarios);
        System.out.println("ok " + name);
      } catch (Exception | AssertionError error) {
        System.out.println("failed " + name + " " + error.toString().replace('\n', ' '));
      }
    }
    System.exit(0);
  }

  /** How the server is reached: a channel that all clients share, or an address that each of them connects to. */
  private record Way(ManagedChannel channel, String address, CredentialsProvider credentials) {
    TransportChannelProvider transport() {
      return FixedTransportChannelProvider.create(GrpcTransportChannel.create(channel));
    }
  }

  private static Way plain() {
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(System.getenv("PUBSUB_EMULATOR_HOST"))
            .usePlaintext()
            .maxInboundMessageSize(LARGEST_ANSWER)
            .build();
    return new Way(channel, null, NoCredentialsProvider.create());
  }

  private final Way way;
  private final TopicAdminClient topics;
  private final SubscriptionAdminClient subscriptions;
  private final String parent;
  private final String topic;
  private final String subscription;
  private final List<Inbox> inboxes = new ArrayList<>();

  private Scenarios(Way way) throws IOException {
    this(way, "project-" + Long.toHexString(System.nanoTime()));
  }

  private Scenarios(Way way, String project) throws IOException {
    this.way = way;
    TopicAdminSettings.Builder topicSettings =
        TopicAdminSettings.newBuilder().setCredentialsProvider(way.credentials());
    SubscriptionAdminSettings.Builder subscriptionSettings =
        SubscriptionAdminSettings.newBuilder().setCredentialsProvider(way.credentials());
    if (way.channel() != null) {
      topicSettings.setTransportChannelProvider(way.transport());
      subscriptionSettings.setTransportChannelProvider(way.transport());
    } else {
      topicSettings.setEndpoint(way.address());
      subscriptionSettings.setEndpoint(way.address());
    }
    topics = TopicAdminClient.create(topicSettings.build());
    subscriptions = SubscriptionAdminClient.create(subscriptionSettings.build());
    parent = "projects/" + project;
    topic = parent + "/topics/orders";
    subscription = parent + "/subscriptions/billing";
  }

  @Override
  public void close() {
    new ArrayList<>(inboxes).forEach(Inbox::close);
    topics.close();
    subscriptions.close();
    if (way.channel() != null) {
      way.channel().shutdownNow();
    }
  }

  /** A message that came, and the way to settle it. */
  private record Received(PubsubMessage message, AckReplyConsumerWithResponse reply) {
    String id() {
      return message.getMessageId();
    }

    boolean ackConfirmed() throws Exception {
      Future<AckResponse> answer = reply.ack();
      return answer.get(SOON_SECONDS, TimeUnit.SECONDS) == AckResponse.SUCCESSFUL;
    }
  }

  private interface Handler {
    void handle(Received received) throws Exception;
  }

  /** Collects what a subscription delivers. */
  private final class Inbox {
    final LinkedBlockingQueue<Received> messages = new LinkedBlockingQueue<>();
    final Subscriber subscriber;

    Inbox(String name, long maxOutstanding, Handler handler) {
      this(name, maxOutstanding, 1, handler);
    }

    Inbox(String name, long maxOutstanding, int streams, Handler handler) {
      MessageReceiverWithAckResponse receiver =
          (message, reply) -> {
            Received received = new Received(message, reply);
            try {
              handler.handle(received);
            } catch (Exception error) {
              throw new IllegalStateException(error);
            }
            messages.add(received);
          };
      FlowControlSettings flow =
          FlowControlSettings.newBuilder().setMaxOutstandingElementCount(maxOutstanding).build();
      Subscriber.Builder builder =
          Subscriber.newBuilder(name, receiver)
              .setCredentialsProvider(way.credentials())
              .setFlowControlSettings(flow)
              .setParallelPullCount(streams);
      subscriber =
          (way.channel() != null ? builder.setChannelProvider(way.transport()) : builder.setEndpoint(way.address())).build();
      subscriber.startAsync();
      inboxes.add(this);
    }

    List<Received> take(int count) throws InterruptedException {
      List<Received> taken = new ArrayList<>();
      while (taken.size() < count) {
        Received next = messages.poll(SOON_SECONDS, TimeUnit.SECONDS);
        check(next != null, taken.size() + " of " + count + " messages came");
        taken.add(next);
      }
      return taken;
    }

    void close() {
      if (inboxes.remove(this)) {
        subscriber.stopAsync().awaitTerminated();
      }
    }
  }

  private static void check(boolean condition, String otherwise) {
    if (!condition) {
      throw new AssertionError(otherwise);
    }
  }

  private Inbox open(Handler handler) {
    return new Inbox(subscription, 1000, handler);
  }

  private static void ack(Received received) {
    received.reply().ack();
  }

  private void pair(Subscription.Builder options) {
    topics.createTopic(topic);
    subscriptions.createSubscription(options.setName(subscription).setTopic(topic).build());
  }

  private static Subscription.Builder options() {
    return Subscription.newBuilder();
  }

  private static PubsubMessage message(String text) {
    return PubsubMessage.newBuilder().setData(ByteString.copyFromUtf8(text)).build();
  }

  private static List<PubsubMessage> numbers(int count, String prefix) {
    return IntStream.range(0, count).mapToObj(n -> message(prefix + n)).toList();
  }

  private Publisher.Builder publisher() {
    Publisher.Builder builder =
        Publisher.newBuilder(topic).setCredentialsProvider(way.credentials()).setEnableMessageOrdering(true);
    return way.channel() != null ? builder.setChannelProvider(way.transport()) : builder.setEndpoint(way.address());
  }

  private List<String> publish(List<PubsubMessage> messages) throws Exception {
    return publish(publisher(), messages);
  }

  private static List<String> publish(Publisher.Builder builder, List<PubsubMessage> messages) throws Exception {
    Publisher publisher = builder.build();
    try {
      List<ApiFuture<String>> futures = new ArrayList<>();
      messages.forEach(m -> futures.add(publisher.publish(m)));
      List<String> ids = new ArrayList<>();
      for (ApiFuture<String> future : futures) {
        ids.add(future.get(SOON_SECONDS, TimeUnit.SECONDS));
      }
      return ids;
    } finally {
      publisher.shutdown();
    }
  }

  private static void same(List<Received> got, List<String> ids) {
    List<String> seen = got.stream().map(Received::id).sorted().toList();
    List<String> expected = ids.stream().sorted().toList();
    check(seen.equals(expected), seen.size() + " other messages than the " + expected.size() + " published");
  }

  private void batch() throws Exception {
    pair(options());
    List<String> ids = publish(numbers(1000, ""));
    same(open(Scenarios::ack).take(1000), ids);
  }

  private void ordered() throws Exception {
    pair(options().setEnableMessageOrdering(true));
    List<PubsubMessage> messages = new ArrayList<>();
    for (int n = 0; n < 50; n++) {
      for (String key : List.of("a", "b", "c")) {
        messages.add(message("" + n).toBuilder().setOrderingKey(key).build());
      }
    }
    Inbox inbox = open(Scenarios::ack);
    publish(messages);
    Map<String, Integer> next = new HashMap<>();
    for (Received received : inbox.take(150)) {
      int expected = next.merge(received.message().getOrderingKey(), 1, Integer::sum) - 1;
      String text = received.message().getData().toStringUtf8();
      check(text.equals("" + expected), text + " instead of " + expected);
    }
  }

  private void compressed() throws Exception {
    pair(options());
    PubsubMessage sent = message("x".repeat(5_000));
    Publisher.Builder compressing = publisher().setEnableCompression(true).setCompressionBytesThreshold(1);
    List<String> ids = publish(compressing, Collections.nCopies(20, sent));
    List<Received> received = open(Scenarios::ack).take(20);
    same(received, ids);
    check(received.stream().allMatch(r -> r.message().getData().equals(sent.getData())), "other bytes came");
  }

  private void large() throws Exception {
    pair(options());
    PubsubMessage sent = message("x".repeat(9_999_000));
    publish(List.of(sent));
    check(open(Scenarios::ack).take(1).get(0).message().getData().equals(sent.getData()), "other bytes came");
  }

  private void flowControl() throws Exception {
    pair(options());
    List<String> ids = publish(numbers(200, ""));
    AtomicInteger now = new AtomicInteger();
    AtomicInteger most = new AtomicInteger();
    Handler handler =
        received -> {
          most.accumulateAndGet(now.incrementAndGet(), Math::max);
          Thread.sleep(2);
          now.decrementAndGet();
          ack(received);
        };
    same(new Inbox(subscription, 10, handler).take(200), ids);
    check(most.get() <= 10, most + " were under way");
  }

  private void manyStreams() throws Exception {
    pair(options());
    Inbox inbox = new Inbox(subscription, 1000, STREAMS, Scenarios::ack);
    List<String> ids = publish(numbers(1000, ""));
    same(inbox.take(1000), ids);
  }

  private void nack() throws Exception {
    pair(options());
    List<String> ids = publish(numbers(1, "m"));
    AtomicBoolean nacked = new AtomicBoolean();
    Inbox inbox =
        open(
            received -> {
              if (nacked.getAndSet(true)) {
                received.reply().ack();
              } else {
                received.reply().nack();
              }
            });
    same(inbox.take(2), List.of(ids.get(0), ids.get(0)));
  }

  private void extend() throws Exception {
    pair(options());
    publish(numbers(1, "m"));
    Inbox inbox =
        open(
            received -> {
              Thread.sleep(14_000);
              ack(received);
            });
    inbox.take(1);
    Thread.sleep(1_000);
    check(inbox.messages.isEmpty(), "the message came again meanwhile");
  }

  /** Receives messages whose acks the server must confirm. */
  private List<Received> confirmed(int count) throws Exception {
    ConcurrentLinkedQueue<Future<AckResponse>> answers = new ConcurrentLinkedQueue<>();
    Inbox inbox = open(received -> answers.add(received.reply().ack()));
    List<Received> received = inbox.take(count);
    for (Future<AckResponse> answer : answers) {
      AckResponse response = answer.get(SOON_SECONDS, TimeUnit.SECONDS);
      check(response == AckResponse.SUCCESSFUL, "an ack was answered with " + response);
    }
    inbox.close();
    return received;
  }

  private void exactlyOnce() throws Exception {
    pair(options().setEnableExactlyOnceDelivery(true));
    List<String> ids = publish(numbers(50, ""));
    same(confirmed(50), ids);
  }

  private void lostLease() throws Exception {
    pair(options().setEnableExactlyOnceDelivery(true).setRetainAckedMessages(true));
    List<String> ids = publish(numbers(2, "m"));
    Inbox inbox = open(received -> {});
    List<Received> held = inbox.take(2);
    check(held.get(0).ackConfirmed(), "an ack was not confirmed");
    // A seek ends every lease behind the client's back.
    seekBack();
    check(!held.get(1).ackConfirmed(), "the ack of a lost lease was confirmed");
    List<Received> again = inbox.take(2);
    for (Received received : again) {
      check(received.ackConfirmed(), "an ack after the seek was not confirmed");
    }
    same(again, ids);
  }

  private void deadLetter() throws Exception {
    String dead = parent + "/topics/dead";
    String graveyard = parent + "/subscriptions/graveyard";
    topics.createTopic(dead);
    subscriptions.createSubscription(options().setName(graveyard).setTopic(dead).build());
    pair(
        options()
            .setDeadLetterPolicy(
                DeadLetterPolicy.newBuilder().setDeadLetterTopic(dead).setMaxDeliveryAttempts(5)));
    publish(numbers(1, "m"));
    List<Received> received = open(r -> r.reply().nack()).take(5);
    for (int n = 0; n < 5; n++) {
      Integer attempt = Subscriber.getDeliveryAttempt(received.get(n).message());
      check(attempt != null && attempt == n + 1, "attempt " + attempt + " instead of " + (n + 1));
    }
    Received buried = new Inbox(graveyard, 1000, Scenarios::ack).take(1).get(0);
    String count = buried.message().getAttributesOrDefault("CloudPubSubDeadLetterSourceDeliveryCount", "none");
    check(count.equals("5"), "a delivery count of " + count);
  }

  private void filter() throws Exception {
    pair(options().setFilter("attributes.color = \"red\""));
    List<PubsubMessage> messages = new ArrayList<>();
    for (int n = 0; n < 20; n++) {
      messages.add(message("x").toBuilder().putAttributes("color", n % 2 == 0 ? "red" : "blue").build());
    }
    List<String> ids = publish(messages);
    List<String> red = IntStream.range(0, 10).mapToObj(n -> ids.get(2 * n)).toList();
    same(open(Scenarios::ack).take(10), red);
  }

  private void seekBack() {
    Timestamp past = Timestamp.newBuilder().setSeconds(System.currentTimeMillis() / 1000 - 3600).build();
    subscriptions.seek(SeekRequest.newBuilder().setSubscription(subscription).setTime(past).build());
  }

  private void seekSnapshot() {
    String snapshot = parent + "/snapshots/before";
    subscriptions.seek(SeekRequest.newBuilder().setSubscription(subscription).setSnapshot(snapshot).build());
  }

  private void rewound(Runnable back) throws Exception {
    pair(options().setRetainAckedMessages(true));
    String snapshot = parent + "/snapshots/before";
    subscriptions.createSnapshot(
        CreateSnapshotRequest.newBuilder().setName(snapshot).setSubscription(subscription).build());
    List<String> ids = publish(numbers(3, "m"));
    Inbox inbox = open(Scenarios::ack);
    inbox.take(3);
    back.run();
    same(inbox.take(3), ids);
  }

  private void detach() throws Exception {
    pair(options());
    topics.detachSubscription(DetachSubscriptionRequest.newBuilder().setSubscription(subscription).build());
    check(subscriptions.getSubscription(subscription).getDetached(), "the subscription does not show it");
    Inbox inbox = open(Scenarios::ack);
    inboxes.remove(inbox);
    try {
      inbox.subscriber.awaitTerminated(SOON_SECONDS, TimeUnit.SECONDS);
      throw new AssertionError("receiving ended without an error");
    } catch (IllegalStateException error) {
      // How deep the cause is depends on whether the stream was still being opened.
      Throwable cause = inbox.subscriber.failureCause();
      while (cause.getCause() != null && !cause.toString().contains("FAILED_PRECONDITION")) {
        cause = cause.getCause();
      }
      check(cause.toString().contains("FAILED_PRECONDITION"), "receiving ended with " + cause);
    }
  }

  private void schema() throws Exception {
    SchemaServiceSettings settings =
        SchemaServiceSettings.newBuilder()
            .setTransportChannelProvider(way.transport())
            .setCredentialsProvider(way.credentials())
            .build();
    try (SchemaServiceClient schemas = SchemaServiceClient.create(settings)) {
      Schema schema = Schema.newBuilder().setType(Schema.Type.AVRO).setDefinition(SCHEMA).build();
      Schema made = schemas.createSchema(parent, schema, "order");
      topics.createTopic(
          Topic.newBuilder()
              .setName(topic)
              .setSchemaSettings(SchemaSettings.newBuilder().setSchema(made.getName()).setEncoding(Encoding.JSON))
              .build());
    }
    publish(List.of(message("{\"id\": 1}")));
    try {
      publish(List.of(message("{\"id\": \"one\"}")));
      throw new AssertionError("a message against the schema was taken");
    } catch (ExecutionException error) {
      check(error.getCause() instanceof InvalidArgumentException, "it was refused with " + error.getCause());
    }
  }

  private void update() {
    pair(options().putLabels("team", "a").setFilter("attributes.color = \"red\""));
    Subscription change =
        Subscription.newBuilder().setName(subscription).setAckDeadlineSeconds(42).putLabels("team", "b").build();
    subscriptions.updateSubscription(change, mask("ack_deadline_seconds", "labels"));
    Subscription shown = subscriptions.getSubscription(subscription);
    check(shown.getAckDeadlineSeconds() == 42 && shown.getLabelsMap().equals(Map.of("team", "b")), "it shows " + shown);
    check(!shown.getFilter().isEmpty(), "the filter is gone");
    topics.updateTopic(Topic.newBuilder().setName(topic).putLabels("team", "c").build(), mask("labels"));
    check(topics.getTopic(topic).getLabelsMap().equals(Map.of("team", "c")), "the topic has other labels");
  }

  private static FieldMask mask(String... paths) {
    return FieldMask.newBuilder().addAllPaths(List.of(paths)).build();
  }

  private void iam() {
    pair(options());
    Binding viewer = Binding.newBuilder().setRole("roles/pubsub.viewer").addMembers("user:jane@shop.example").build();
    topics.setIamPolicy(topic, Policy.newBuilder().addBindings(viewer).build());
    Policy policy = topics.getIamPolicy(topic);
    check(policy.getBindingsList().equals(List.of(viewer)) && !policy.getEtag().isEmpty(), "the policy is " + policy);
    List<String> wanted = List.of("pubsub.topics.get", "pubsub.topics.publish");
    List<String> tested = topics.testIamPermissions(topic, wanted).getPermissionsList().stream().sorted().toList();
    check(tested.equals(wanted), "the permissions are " + tested);
  }

  private void idle() throws Exception {
    pair(options());
    Inbox inbox = open(Scenarios::ack);
    Thread.sleep(IDLE_MILLISECONDS);
    long before = System.nanoTime();
    publish(numbers(1, "m"));
    inbox.take(1);
    long seconds = TimeUnit.NANOSECONDS.toSeconds(System.nanoTime() - before);
    check(seconds < 15, "it took " + seconds + " s");
    check(inbox.subscriber.isRunning(), "the subscriber ended");
  }

  /** The server closes each stream after about 3 s. */
  private void reconnect() throws Exception {
    pair(options());
    Inbox inbox = open(Scenarios::ack);
    List<String> ids = new ArrayList<>();
    for (int n = 0; n < 24; n++) {
      ids.addAll(publish(numbers(1, "m")));
      Thread.sleep(500);
    }
    same(inbox.take(24), ids);
    check(inbox.subscriber.isRunning(), "the subscriber ended");
  }

  private static void get(String variable) throws Exception {
    HttpRequest request = HttpRequest.newBuilder(URI.create(System.getenv(variable))).build();
    int status = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.discarding()).statusCode();
    check(status == 200, variable + " answered " + status);
  }

  private static void waitUntil(Callable<Boolean> condition, String what) throws Exception {
    long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(OUTAGE_SECONDS);
    while (!condition.call()) {
      check(System.nanoTime() < until, "waited in vain for " + what);
      Thread.sleep(10);
    }
  }

  /** Publishes, receives and acks while servers are killed, and notes every ack that was confirmed. */
  private void kill() throws Exception {
    pair(options().setEnableExactlyOnceDelivery(true));
    Set<String> confirmed = ConcurrentHashMap.newKeySet();
    Set<String> arrived = ConcurrentHashMap.newKeySet();
    Set<String> acked = ConcurrentHashMap.newKeySet();
    Set<String> returned = ConcurrentHashMap.newKeySet();
    Inbox inbox =
        open(
            received -> {
              arrived.add(received.id());
              if (acked.contains(received.id())) {
                returned.add(received.id());
              }
              ApiFutures.transform(
                  (ApiFuture<AckResponse>) received.reply().ack(),
                  answer -> answer == AckResponse.SUCCESSFUL && acked.add(received.id()),
                  Runnable::run);
            });
    AtomicBoolean stop = new AtomicBoolean();
    ConcurrentLinkedQueue<Throwable> failures = new ConcurrentLinkedQueue<>();
    Publisher publisher = publisher().build();
    Runnable keepPublishing =
        () -> {
          // The client repeats what fails meanwhile.
          try {
            while (!stop.get()) {
              confirmed.add(publisher.publish(message("m")).get(OUTAGE_SECONDS, TimeUnit.SECONDS));
            }
          } catch (Exception error) {
            failures.add(error);
          }
        };
    List<Thread> publishers = IntStream.range(0, 4).mapToObj(n -> new Thread(keepPublishing)).toList();
    publishers.forEach(Thread::start);
    try {
      for (int n = 0; n <= KILLS; n++) {
        int wanted = confirmed.size() + BETWEEN_KILLS;
        waitUntil(() -> confirmed.size() >= wanted || !failures.isEmpty(), "confirmed publishes");
        check(failures.isEmpty(), "publishing failed with " + failures);
        if (n < KILLS) {
          get("LANDLINE_DISTURB");
        }
      }
    } finally {
      stop.set(true);
      for (Thread thread : publishers) {
        thread.join();
      }
      publisher.shutdown();
    }
    // Not all acks are confirmed: the answer to one that was carried out may be lost with its server.
    waitUntil(() -> arrived.containsAll(confirmed), "the messages that are missing");
    check(returned.isEmpty(), returned.size() + " messages came after their confirmed ack");
    check(inbox.subscriber.isRunning(), "the subscriber ended");
  }

  private static void key() throws Exception {
    trust(Path.of(System.getenv("SSL_CERT_FILE")));
    String project = "project-" + Long.toHexString(System.nanoTime());
    try (Scenarios admin = new Scenarios(with("admin"), project);
        Scenarios reader = new Scenarios(with("reader"), project);
        Scenarios nobody = new Scenarios(new Way(null, address(), NoCredentialsProvider.create()), project)) {
      admin.pair(options());
      List<String> ids = admin.publish(numbers(1, "m"));
      same(admin.open(Scenarios::ack).take(1), ids);
      check(reader.topics.getTopic(reader.topic).getName().equals(reader.topic), "another topic");
      refused(StatusCode.Code.PERMISSION_DENIED, "pubsub.topics.publish", () -> reader.publish(numbers(1, "m")));
      refused(StatusCode.Code.UNAUTHENTICATED, "", () -> nobody.topics.getTopic(nobody.topic));
      new ArrayList<>(admin.inboxes).forEach(Inbox::close);
      get("LANDLINE_DELETE_KEY");
      waitUntil(
          () -> {
            try {
              admin.topics.getTopic(admin.topic);
              return false;
            } catch (ApiException error) {
              check(error.getStatusCode().getCode() == StatusCode.Code.UNAUTHENTICATED, "it ended with " + error);
              return true;
            }
          },
          "the end of the deleted key");
    }
  }

  private static String address() {
    return System.getenv("LANDLINE_ADDRESS");
  }

  private static Way with(String name) throws IOException {
    try (FileInputStream file = new FileInputStream(System.getenv("LANDLINE_KEYS") + "/" + name + ".json")) {
      return new Way(null, address(), FixedCredentialsProvider.create(ServiceAccountCredentials.fromStream(file)));
    }
  }

  /** What `keytool` does for a user: Java reads roots from a key store only. */
  private static void trust(Path certificate) throws Exception {
    KeyStore store = KeyStore.getInstance("PKCS12");
    store.load(null, null);
    try (FileInputStream file = new FileInputStream(certificate.toFile())) {
      store.setCertificateEntry("landline", CertificateFactory.getInstance("X.509").generateCertificate(file));
    }
    Path made = Files.createTempFile("landline-roots-", ".p12");
    made.toFile().deleteOnExit();
    try (FileOutputStream file = new FileOutputStream(made.toFile())) {
      store.store(file, "changeit".toCharArray());
    }
    System.setProperty("javax.net.ssl.trustStore", made.toString());
    System.setProperty("javax.net.ssl.trustStorePassword", "changeit");
  }

  private static void refused(StatusCode.Code code, String text, Callable<?> call) throws Exception {
    try {
      call.call();
    } catch (Exception error) {
      Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
      boolean right = cause instanceof ApiException api && api.getStatusCode().getCode() == code;
      check(right && cause.getMessage().contains(text), "instead of " + code + ": " + cause);
      return;
    }
    throw new AssertionError("no " + code);
  }
}
