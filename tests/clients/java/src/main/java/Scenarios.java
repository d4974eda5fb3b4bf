import com.google.api.core.ApiFuture;
import com.google.api.gax.batching.FlowControlSettings;
import com.google.api.gax.core.NoCredentialsProvider;
import com.google.api.gax.grpc.GrpcTransportChannel;
import com.google.api.gax.rpc.FixedTransportChannelProvider;
import com.google.api.gax.rpc.InvalidArgumentException;
import com.google.api.gax.rpc.TransportChannelProvider;
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
import com.google.protobuf.ByteString;
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
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
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
  private static final String SCHEMA =
      "{\"type\": \"record\", \"name\": \"Order\", \"fields\": [{\"name\": \"id\", \"type\": \"int\"}]}";

  private interface Scenario {
    void run(Scenarios scenarios) throws Exception;
  }

  private static final Map<String, Scenario> ALL = new LinkedHashMap<>();

  static {
    ALL.put("batch", Scenarios::batch);
    ALL.put("ordered", Scenarios::ordered);
    ALL.put("large", Scenarios::large);
    ALL.put("flow_control", Scenarios::flowControl);
    ALL.put("nack", Scenarios::nack);
    ALL.put("extend", Scenarios::extend);
    ALL.put("exactly_once", Scenarios::exactlyOnce);
    ALL.put("lost_lease", Scenarios::lostLease);
    ALL.put("dead_letter", Scenarios::deadLetter);
    ALL.put("filter", Scenarios::filter);
    ALL.put("seek", s -> s.rewound(s::seekBack));
    ALL.put("snapshot", s -> s.rewound(s::seekSnapshot));
    ALL.put("detach", Scenarios::detach);
    ALL.put("schema", Scenarios::schema);
    ALL.put("restart", Scenarios::restart);
  }

  public static void main(String[] names) throws Exception {
    for (String name : names) {
      if (!ALL.containsKey(name)) {
        System.out.println("absent " + name);
        continue;
      }
      try (Scenarios scenarios = new Scenarios(Long.toHexString(System.nanoTime()))) {
        ALL.get(name).run(scenarios);
        System.out.println("ok " + name);
      } catch (Exception | AssertionError error) {
        System.out.println("failed " + name + " " + error.toString().replace('\n', ' '));
      }
    }
    System.exit(0);
  }

  private final ManagedChannel channel;
  private final TransportChannelProvider transport;
  private final TopicAdminClient topics;
  private final SubscriptionAdminClient subscriptions;
  private final String parent;
  private final String topic;
  private final String subscription;
  private final List<Inbox> inboxes = new ArrayList<>();

  private Scenarios(String project) throws IOException {
    channel =
        ManagedChannelBuilder.forTarget(System.getenv("PUBSUB_EMULATOR_HOST"))
            .usePlaintext()
            .maxInboundMessageSize(LARGEST_ANSWER)
            .build();
    transport = FixedTransportChannelProvider.create(GrpcTransportChannel.create(channel));
    topics =
        TopicAdminClient.create(
            TopicAdminSettings.newBuilder()
                .setTransportChannelProvider(transport)
                .setCredentialsProvider(NoCredentialsProvider.create())
                .build());
    subscriptions =
        SubscriptionAdminClient.create(
            SubscriptionAdminSettings.newBuilder()
                .setTransportChannelProvider(transport)
                .setCredentialsProvider(NoCredentialsProvider.create())
                .build());
    parent = "projects/project-" + project;
    topic = parent + "/topics/orders";
    subscription = parent + "/subscriptions/billing";
  }

  @Override
  public void close() {
    new ArrayList<>(inboxes).forEach(Inbox::close);
    topics.close();
    subscriptions.close();
    channel.shutdownNow();
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
      subscriber =
          Subscriber.newBuilder(name, receiver)
              .setChannelProvider(transport)
              .setCredentialsProvider(NoCredentialsProvider.create())
              .setFlowControlSettings(flow)
              .build();
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

  private List<String> publish(List<PubsubMessage> messages) throws Exception {
    Publisher publisher =
        Publisher.newBuilder(topic)
            .setChannelProvider(transport)
            .setCredentialsProvider(NoCredentialsProvider.create())
            .setEnableMessageOrdering(true)
            .build();
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

  private void large() throws Exception {
    pair(options());
    PubsubMessage sent = message("x".repeat(9_000_000));
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
      Throwable cause = inbox.subscriber.failureCause();
      check(String.valueOf(cause).contains("FAILED_PRECONDITION"), "receiving ended with " + cause);
    }
  }

  private void schema() throws Exception {
    SchemaServiceSettings settings =
        SchemaServiceSettings.newBuilder()
            .setTransportChannelProvider(transport)
            .setCredentialsProvider(NoCredentialsProvider.create())
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

  private void restart() throws Exception {
    pair(options().setEnableExactlyOnceDelivery(true));
    List<String> before = publish(numbers(50, "before-"));
    same(confirmed(50), before);
    List<String> expected = new ArrayList<>(publish(numbers(50, "kept-")));
    HttpRequest request = HttpRequest.newBuilder(URI.create(System.getenv("LANDLINE_RESTART"))).build();
    int status = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.discarding()).statusCode();
    check(status == 200, "no restart: " + status);
    expected.addAll(publish(numbers(50, "after-")));
    same(confirmed(100), expected);
  }
}
